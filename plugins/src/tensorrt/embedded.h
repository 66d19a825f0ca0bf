// The library data that is part of this shared library.
#ifndef TRTLLM_MLA_TENSORRT_EMBEDDED_H
#define TRTLLM_MLA_TENSORRT_EMBEDDED_H

#include "trtllm_mla/plan.h"

namespace trtllm_mla {

// The library data, read at the first call; null if it is broken, which is logged once.
const tmla_library *embedded_library() noexcept;

} // namespace trtllm_mla

#endif
