#include "isa_avx512.h"

#include "attend.h"
#include "store.h"

namespace tq {
const Kernels avx512_kernels{"avx512", shared_bytes, share, attend_scratch, attend, combine, store_scratch, store};
}
