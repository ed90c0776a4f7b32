// Small helpers of the instruction sets' units, all static: see kernel.h.
#pragma once

#include <cstdint>

namespace tq {
namespace {

inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

template <class T, class P>
inline T load_as(const P* p) {
    T x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

template <class T, class P>
inline void store_as(P* p, T x) {
    __builtin_memcpy(p, &x, sizeof x);
}

inline float bf16_to_float(uint16_t h) {
    uint32_t u = uint32_t(h) << 16;
    return load_as<float>(&u);
}

inline uint16_t float_to_bf16(float x) {
    uint32_t u = load_as<uint32_t>(&x);
    if ((u & 0x7FFFFFFF) > 0x7F800000) return uint16_t((u >> 16) | 0x40);
    return uint16_t((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
}

inline float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3FF;
    if (exponent == 0) {
        float x = float(mantissa) * 5.9604644775390625e-8f;  // 2**-24
        return sign ? -x : x;
    }
    uint32_t u = sign | (exponent == 31 ? 0x7F800000 : (exponent + 112) << 23) | (mantissa << 13);
    return load_as<float>(&u);
}

// To the nearest, ties to even.
inline uint16_t float_to_half(float x) {
    uint32_t u = load_as<uint32_t>(&x), sign = (u >> 16) & 0x8000;
    u &= 0x7FFFFFFF;
    if (u > 0x7F800000) return uint16_t(sign | 0x7E00);
    if (u >= 0x477FF000) return uint16_t(sign | 0x7C00);
    if (u < 0x38800000) {  // subnormal: the addition rounds at 2**-24
        float shifted = load_as<float>(&u) + 0.5f;
        return uint16_t(sign | (load_as<uint32_t>(&shifted) - 0x3F000000));
    }
    return uint16_t(sign | ((u - 0x38000000 + 0xFFF + ((u >> 13) & 1)) >> 13));
}

// Keeps a loop's constant in a register, where the compiler would read it from memory every time.
template <class T>
inline T in_register(T x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}

// A product that no compiler fuses with the sum around it: the same bits as the reference's.
inline float rounded_product(float a, float b) { return in_register(a * b); }

// Code i of a little-endian bit stream.
template <int BITS>
inline int code_at(const uint8_t* row, int64_t i) {
    int64_t bit = i * BITS;
    int word = row[bit >> 3];
    if ((bit & 7) + BITS > 8) word |= row[(bit >> 3) + 1] << 8;
    return (word >> (bit & 7)) & ((1 << BITS) - 1);
}

}  // namespace
}  // namespace tq
