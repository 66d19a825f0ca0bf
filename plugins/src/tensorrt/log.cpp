#include "log.h"

#include <atomic>
#include <cstdio>
#include <exception>

#include "loaded_tensorrt.h"

namespace trtllm_mla {
namespace {

std::atomic<nvinfer1::ILoggerFinder *> logger_finder{nullptr};

nvinfer1::ILogger *find_logger() {
    if (nvinfer1::ILoggerFinder *const finder = logger_finder.load()) {
        if (nvinfer1::ILogger *const logger = finder->findLogger()) {
            return logger;
        }
    }
    for (const TensorRT &tensorrt : loaded_tensorrt().callable) {
        if (tensorrt.logger != nullptr) {
            return tensorrt.logger;
        }
    }
    return nullptr;
}

void log(nvinfer1::ILogger::Severity severity, const std::string &text) noexcept {
    try {
        const std::string line = "trtllm_mla: " + text;
        if (nvinfer1::ILogger *const logger = find_logger()) {
            logger->log(severity, line.c_str());
        } else {
            std::fprintf(stderr, "%s\n", line.c_str());
        }
    } catch (const std::exception &error) {
        std::fprintf(stderr, "trtllm_mla: %s\n", error.what());
    }
}

} // namespace

void set_logger_finder(nvinfer1::ILoggerFinder *finder) noexcept {
    try {
        // It may be that of a library that cannot be called.
        logger_finder = loaded_tensorrt().other_layout.empty() ? finder : nullptr;
    } catch (const std::exception &) {
        logger_finder = nullptr;
    }
}

void log_error(const std::string &text) noexcept { log(nvinfer1::ILogger::Severity::kERROR, text); }

void log_warning(const std::string &text) noexcept { log(nvinfer1::ILogger::Severity::kWARNING, text); }

} // namespace trtllm_mla
