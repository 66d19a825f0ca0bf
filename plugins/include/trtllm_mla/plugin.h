/* What libtrtllm_mla_plugin.so exports besides plan.h.
 *
 * TensorRT calls the first two functions; NvInferRuntime.h has their types, and names them for plugin libraries:
 *
 *     IPluginCreatorInterface *const *getCreators(int32_t &num_creators);
 *     void setLoggerFinder(ILoggerFinder *finder);
 */
#ifndef TRTLLM_MLA_PLUGIN_H
#define TRTLLM_MLA_PLUGIN_H

#include "trtllm_mla/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The library data that is embedded in the plugin library, for the functions of plan.h; it is never to be closed. Null
 * if it is broken. */
TMLA_API const tmla_library *trtllm_mla_plugin_library(void);

/* How often TensorRT has been told, since the library was loaded, that an output of a plugin is an input's memory. It
 * asks once or more for every such output of an engine that it builds; if it never does, it copies caches. */
TMLA_API uint64_t trtllm_mla_plugin_num_aliases(void);

#ifdef __cplusplus
}
#endif

#endif
