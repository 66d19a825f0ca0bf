// Messages, through TensorRT's logger.
#ifndef TRTLLM_MLA_TENSORRT_LOG_H
#define TRTLLM_MLA_TENSORRT_LOG_H

#include <string>

#include <NvInferRuntime.h>

namespace trtllm_mla {

// What finds the logger of the engine that calls a plugin; null to forget it.
void set_logger_finder(nvinfer1::ILoggerFinder *finder) noexcept;

// Logs a message behind this library's name. Where TensorRT has no logger yet, it goes to standard error.
void log_error(const std::string &text) noexcept;
void log_warning(const std::string &text) noexcept;

} // namespace trtllm_mla

#endif
