// NEON (AArch64). Look-ups are `tbl`: 16 byte entries in a register, 8 codes at a time.
#pragma once

#include <arm_neon.h>

#include "bits.h"

namespace tq {
namespace {

struct Isa {
    static constexpr int W = 4, REGISTERS = 32;
    typedef float vf __attribute__((vector_size(4 * W)));
    typedef int32_t vi __attribute__((vector_size(4 * W)));

    template <int BITS>
    struct Keys;
    template <int BITS>
    struct Values;

    static int32_t key_dimension(int, int32_t column) { return column; }
    static int32_t value_dimension(int, int32_t column) { return column; }
    static int64_t key_load(int) { return 4; }
    static int64_t value_load(int) { return 4; }

    static vi load(const int16_t* p) { return load_as<vi>(p); }
    static vi madd(vi acc, vi a, vi b) {
        int16x8_t x = vreinterpretq_s16_s32((int32x4_t)a), y = vreinterpretq_s16_s32((int32x4_t)b);
        int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
        return acc + (vi)vpaddq_s32(low, high);
    }

    static int32_t sum(vi x) { return vaddvq_s32((int32x4_t)x); }
    template <int RB, int TB, class V, class T>
    static void reduce(const V (&acc)[RB][TB], T* out, int64_t stride) {
        for (int r = 0; r < RB; r++)
            for (int t = 0; t < TB; t++) out[r * stride + t] = sum(acc[r][t]);
    }

    static vf larger(vf a, vf b) { return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
    static float largest(vf x) { return vmaxvq_f32((float32x4_t)x); }
    static float sum(vf x) { return vaddvq_f32((float32x4_t)x); }
    static vi round(vf x) { return (vi)vcvtnq_s32_f32((float32x4_t)x); }
    static void store16(int16_t* out, vi a, vi b) {
        vst1q_s16(out, vqmovn_high_s32(vqmovn_s32((int32x4_t)a), (int32x4_t)b));
    }
    static vf load_f16(const uint16_t* p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    static uint16_t to_f16(float x) { return float_to_half(x); }

   private:
    template <int BITS>
    struct Table {
        uint8x16_t low, high, place;
        int16x8_t shifts;

        explicit Table(const int16_t* lut) {
            uint8_t bytes[3][16];
            int16_t shift[8];
            for (int i = 0; i < 16; i++) {
                bytes[0][i] = uint8_t(lut[i % (1 << BITS)] & 0xFF);
                bytes[1][i] = uint8_t((lut[i % (1 << BITS)] >> 8) & 0xFF);
                bytes[2][i] = uint8_t(i / 2 * BITS / 8 + i % 2);
            }
            for (int i = 0; i < 8; i++) shift[i] = int16_t(-(i * BITS % 8));
            low = vld1q_u8(bytes[0]);
            high = vld1q_u8(bytes[1]);
            place = vld1q_u8(bytes[2]);
            shifts = vld1q_s16(shift);
        }

        int16x8_t look_up(const uint8_t* p) const {
            uint8x16_t x = vreinterpretq_u8_u32(vdupq_n_u32(load_as<uint32_t>(p)));
            uint16x8_t words = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(x, place)), shifts);
            uint8x8_t codes = vand_u8(vmovn_u16(words), vdup_n_u8((1 << BITS) - 1));
            uint8x8_t l = vqtbl1_u8(low, codes), h = vqtbl1_u8(high, codes);
            return vreinterpretq_s16_u8(vcombine_u8(vzip1_u8(l, h), vzip2_u8(l, h)));
        }
    };
};

template <int BITS>
struct Isa::Keys {
    static constexpr int PARTS = 1, N = 1;
    Table<BITS> table;
    explicit Keys(const int16_t* lut) : table(lut) {}
    template <int PART>
    void decode(const uint8_t* p, vi (&out)[N]) const {
        out[0] = (vi)vreinterpretq_s32_s16(table.look_up(p));
    }
};

template <int BITS>
struct Isa::Values {
    static constexpr int N = 2;
    Table<BITS> table;
    explicit Values(const int16_t* lut) : table(lut) {}
    void decode(const uint8_t* p, const uint8_t* q, vi (&out)[N]) const {
        int16x8_t a = table.look_up(p), b = table.look_up(q);
        out[0] = (vi)vreinterpretq_s32_s16(vzip1q_s16(a, b));
        out[1] = (vi)vreinterpretq_s32_s16(vzip2q_s16(a, b));
    }
};

}  // namespace
}  // namespace tq
