#include "isa_scalar.h"

#include "attend.h"
#include "store.h"

namespace tq {
const Kernels scalar_kernels{"scalar", shared_bytes, share, attend_scratch, attend, combine, store_scratch, store};
}
