#include "isa_scalar.h"

#include "attend.h"
#include "store.h"

namespace tq {
const Kernels scalar_kernels{"scalar", attend_scratch, attend, combine, store_scratch, store};
}
