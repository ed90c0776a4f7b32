#include "isa_avx2.h"

#include "attend.h"
#include "store.h"

namespace tq {
const Kernels avx2_kernels{"avx2", shared_bytes, share, attend_scratch, attend, combine, store_scratch, store};
}
