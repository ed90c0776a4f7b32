#include "isa_neon.h"

#include "attend.h"
#include "store.h"

namespace tq {
const Kernels neon_kernels{"neon", shared_bytes, share, attend_scratch, attend, combine, store_scratch, store};
}
