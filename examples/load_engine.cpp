// Runs a decode step of an engine, of one request with one new token, without Python. Weights are zeros here: a server
// copies them from the checkpoint, as weights.json in the engine directory says.
//
//   g++ -std=c++17 load_engine.cpp -I$TRT/include -I$CUDA/include -L$TRT/lib -L$CUDA/lib64 -ltensorrt_rtx -lcudart
//   ./a.out libtrtllm_mla_plugin.so engine/rank0.engine        (TensorRT's own library: -lnvinfer)
#include <NvInferRuntime.h>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>
using namespace nvinfer1;
struct Logger : ILogger {
    void log(Severity severity, char const *text) noexcept override {
        if (severity <= Severity::kWARNING) std::fprintf(stderr, "%s\n", text);
    }
};
// The step's inputs. All others have the least shape that the engine takes: no token, and one page of cache.
const std::map<std::string, std::vector<int32_t>> kINPUTS = {
    {"input_ids", {7}}, {"slot_mapping", {0}}, {"last_token_ids", {0}}, {"generation_position_ids", {0}},
    {"generation_query_offsets", {0, 1}}, {"generation_sequence_length", {1}}, {"generation_query_index", {0}},
    {"kv_cache_block_offsets", {0}}};
int fail(std::string const &what) { return std::fprintf(stderr, "cannot %s\n", what.c_str()), 1; }
int main(int argc, char **argv) {
    if (argc != 3) return fail("start: expected LIBRARY.so and ENGINE");
    Logger logger;
    if (!getPluginRegistry()->loadLibrary(argv[1])) return fail("load the plugin library");
    std::ifstream file(argv[2], std::ios::binary);
    std::string data{std::istreambuf_iterator<char>(file), {}};
    std::unique_ptr<IRuntime> runtime(createInferRuntime(logger));
    std::unique_ptr<ICudaEngine> engine(runtime ? runtime->deserializeCudaEngine(data.data(), data.size()) : nullptr);
    if (!engine) return fail("read the engine");
    std::unique_ptr<IExecutionContext> context(
        engine->createExecutionContext(ExecutionContextAllocationStrategy::kUSER_MANAGED));
    std::map<std::string, void *> memory;
    for (int32_t i = 0; context && i < engine->getNbIOTensors(); ++i) { // inputs come before outputs
        std::string const name = engine->getIOTensorName(i);
        bool const is_input = engine->getTensorIOMode(name.c_str()) == TensorIOMode::kINPUT;
        Dims dims = is_input ? engine->getProfileShape(name.c_str(), 0, OptProfileSelector::kMIN)
                             : context->getTensorShape(name.c_str());
        auto const values = kINPUTS.find(name);
        if (values != kINPUTS.end()) std::fill_n(dims.d, dims.nbDims, 1), dims.d[0] = values->second.size();
        if (is_input && !context->setInputShape(name.c_str(), dims)) return fail("set a shape");
        std::size_t bytes = engine->getTensorBytesPerComponent(name.c_str());
        for (int32_t axis = 0; axis < dims.nbDims; ++axis) bytes *= dims.d[axis];
        std::printf("%s %s: %zu bytes\n", is_input ? "input" : "output", name.c_str(), bytes);
        if (name.rfind("present_", 0) == 0) memory[name] = memory["past_" + name.substr(8)]; // updated in place
        else if (cudaMalloc(&memory[name], bytes + 1) || cudaMemset(memory[name], 0, bytes)) return fail("allocate");
        if (values != kINPUTS.end()) cudaMemcpy(memory[name], values->second.data(), bytes, cudaMemcpyHostToDevice);
        if (!context->setTensorAddress(name.c_str(), memory[name])) return fail("bind " + name);
    }
    int64_t const scratch = context ? context->updateDeviceMemorySizeForShapes() : -1;
    if (scratch < 0 || cudaMalloc(&memory["scratch"], scratch + 1)) return fail("allocate");
    context->setDeviceMemoryV2(memory["scratch"], scratch);
    return context->enqueueV3(nullptr) && !cudaDeviceSynchronize() ? 0 : fail("run the step");
}
