/* Launch plans from library data: which kernels an MLA operation launches, how, and with how much workspace.
 *
 * The library data is what `trtllm-mla plugin-library` writes (library.bin): operations, their launch plans as
 * expressions over sizes, and compiled kernels. This interface reads it and evaluates plans. It knows neither CUDA nor
 * TensorRT, allocates nothing on a device, and holds no global state.
 *
 * Errors. Functions that can fail return TMLA_OK or TMLA_ERROR, and fill a message that names the operation, what was
 * found and what was expected. `message` may be null. Nothing here aborts, throws, or prints. Hostile data, sizes and
 * attribute values give errors; pointers must be valid as documented.
 *
 * Threads. A library is constant once opened: all functions but tmla_library_close may be called on it at the same
 * time. A plan belongs to its caller.
 *
 * Usage, for a call of an operation on a GPU:
 *
 *     tmla_library_open(data, size, &library, &message);                                   // once
 *     const tmla_op *op = tmla_library_find_op(library, "LatentAttention");                 // once for each plugin
 *     tmla_workspace_bytes(library, op, attributes, types, max_shapes, &bytes, &message);   // when an engine is built
 *     tmla_find_operation(library, op, attributes, types, shapes, 89, &operation, &message);
 *     tmla_plan_create(operation, attributes, shapes, multiprocessors, bytes, &plan, &message);
 *     ... for each of plan->launches: launch its kernel ...
 *     tmla_plan_free(plan);
 */
#ifndef TRTLLM_MLA_PLAN_H
#define TRTLLM_MLA_PLAN_H

#include <stdint.h>

#if defined(__GNUC__)
#define TMLA_API __attribute__((visibility("default")))
#else
#define TMLA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    TMLA_OK = 0,
    TMLA_ERROR = 1
} tmla_status;

/* Text of an error, zero-terminated; cut where it is longer. */
typedef struct {
    char text[2048];
} tmla_message;

/* Element types. */
typedef enum {
    TMLA_FLOAT32 = 0,
    TMLA_FLOAT16 = 1,
    TMLA_BFLOAT16 = 2,
    TMLA_INT8 = 3,
    TMLA_INT32 = 4
} tmla_type;

/* What a tensor's element type is the same as, in the contract of an operation. */
typedef enum {
    TMLA_ELEMENT_MODEL = 0, /* the network's type, one for all such tensors of a node: float32, float16 or bfloat16 */
    TMLA_ELEMENT_CACHE = 1, /* the latent cache's: a network's type, or int8 where rows are quantised */
    TMLA_ELEMENT_INT8 = 2,
    TMLA_ELEMENT_INT32 = 3,
    TMLA_ELEMENT_FLOAT32 = 4
} tmla_element;

typedef enum {
    TMLA_ATTRIBUTE_INT = 0,  /* ONNX int; kernels are compiled for its value */
    TMLA_ATTRIBUTE_FLOAT = 1 /* ONNX float; plans pass it on, whatever it is */
} tmla_attribute_type;

/* An attribute of an operation's ONNX node. All are required. */
typedef struct {
    const char *name;
    int32_t type; /* tmla_attribute_type */
} tmla_attribute;

/* Value of an attribute; which member is read depends on the attribute's type. */
typedef struct {
    int64_t integer;
    double real;
} tmla_value;

/* Where the size of a dimension comes from. */
typedef enum {
    TMLA_DIM_NUMBER = 0,    /* offset alone */
    TMLA_DIM_INPUT = 1,     /* size of `axis` of input number `input`, plus offset */
    TMLA_DIM_ATTRIBUTE = 2  /* value of attribute number `attribute`, plus offset */
} tmla_dim_source;

/* A dimension in a contract. An input's dimension refers to the first input and axis that has its name, possibly to
 * itself; the offset is relative to that axis. */
typedef struct {
    const char *name; /* as in the contract: tokens, requests+1, 3 */
    int32_t source;   /* tmla_dim_source */
    int32_t input;
    int32_t axis;
    int32_t attribute;
    int64_t offset;
} tmla_dim;

/* An input or output of an operation. */
typedef struct {
    const char *name;
    int32_t element; /* tmla_element */
    int32_t num_dims;
    const tmla_dim *dims;
} tmla_tensor;

/* The contract of an operation: a plugin of the namespace `trtllm_mla`, version `1`. */
typedef struct {
    const char *name;
    int32_t num_attributes;
    int32_t num_inputs;
    int32_t num_outputs;
    const tmla_attribute *attributes;
    const tmla_tensor *inputs;
    const tmla_tensor *outputs;
    const int32_t *aliases; /* for each output, the input that it updates in place, or -1 */
} tmla_op;

typedef enum {
    TMLA_PARAMETER_POINTER = 0, /* 8 bytes */
    TMLA_PARAMETER_INT32 = 1,   /* 4 bytes */
    TMLA_PARAMETER_FLOAT32 = 2  /* 4 bytes */
} tmla_parameter_type;

/* A compiled kernel.
 *
 * It takes `num_parameters` parameters, one for each argument of a launch, and then `num_null_pointers` more that are
 * null pointers of 8 bytes. Pointers must be multiples of `pointer_alignment`. */
typedef struct {
    const char *key;   /* name of the variant, unique in a target */
    const char *op;    /* operation whose kernels it belongs to, for messages */
    const char *entry; /* its name in the cubin */
    int32_t compute_capability; /* 89 for sm_89: the cubin runs on no other */
    int32_t block_threads;
    int64_t shared_bytes; /* dynamic shared memory; above 49152, a kernel has to opt in */
    int32_t pointer_alignment;
    int32_t num_parameters;
    const int32_t *parameters; /* tmla_parameter_type of each */
    int32_t num_null_pointers;
    const void *cubin; /* in the library data */
    uint64_t cubin_size;
} tmla_kernel;

/* A size that is fixed when an engine is built. */
typedef struct {
    int32_t input;
    int32_t axis;
    int64_t size;
} tmla_fixed_size;

/* An operation with all that is fixed when an engine is built, on one target. */
typedef struct {
    const tmla_op *op;
    int32_t compute_capability;
    const char *model_dtype;      /* bfloat16 */
    const char *cache_dtype;      /* nvfp4; empty where the operation has no cache */
    int32_t tile_s;               /* cached tokens that a kernel works on at once; 0 where there is no cache */
    int32_t num_stages;           /* tiles in flight; 0 where there is no cache */
    const tmla_value *attributes; /* one for each of op->attributes; those of type float are not fixed, and 0 here */
    const int32_t *types;         /* tmla_type of each input, then of each output */
    int32_t num_fixed_sizes;
    const tmla_fixed_size *fixed_sizes;
    int32_t num_kernels;
    const tmla_kernel *const *kernels; /* all that its plans can launch */
} tmla_operation;

/* Shape of an input. */
typedef struct {
    int32_t rank;
    const int64_t *sizes;
} tmla_shape;

typedef enum {
    TMLA_ARGUMENT_TENSOR = 0,    /* address of input `index`, or of output `index - num_inputs` */
    TMLA_ARGUMENT_WORKSPACE = 1, /* address of the workspace plus `integer` bytes */
    TMLA_ARGUMENT_INT32 = 2,     /* `integer`, which fits in 32 bits */
    TMLA_ARGUMENT_FLOAT32 = 3    /* `real`, to be rounded to float */
} tmla_argument_kind;

/* An argument of a launch. Its kind agrees with the kernel's parameter. */
typedef struct {
    int32_t kind; /* tmla_argument_kind */
    int32_t index;
    int64_t integer;
    double real;
} tmla_argument;

/* A launch: `grid` blocks of kernel->block_threads threads; kernel->num_parameters arguments. */
typedef struct {
    const tmla_kernel *kernel;
    uint32_t grid[3]; /* within CUDA's limits: 2^31 - 1, 65535, 65535 */
    const tmla_argument *arguments;
} tmla_launch;

/* Launches to run one after the other on one stream; none where there is nothing to do. */
typedef struct {
    int64_t workspace_bytes; /* not more than there is */
    int32_t num_launches;
    const tmla_launch *launches;
} tmla_plan;

typedef struct tmla_library tmla_library;

/* Reads library data, which must stay where it is, unchanged, until the library is closed. No alignment is needed. */
TMLA_API int32_t tmla_library_open(const void *data, uint64_t size, tmla_library **library, tmla_message *message);

/* Frees a library, and with it all that its functions returned but plans' memory; null is allowed. No plan of it may be
 * read afterwards, only freed. */
TMLA_API void tmla_library_close(tmla_library *library);

/* Version of trtllm_mla that wrote the data. */
TMLA_API const char *tmla_library_version(const tmla_library *library);

/* Contracts, in the order of the data. All operations of trtllm_mla have one, also those that no network of the library
 * has. Null where the index is out of range. */
TMLA_API int32_t tmla_library_num_ops(const tmla_library *library);
TMLA_API const tmla_op *tmla_library_op(const tmla_library *library, int32_t index);

/* The contract of the operation with a name, or null. */
TMLA_API const tmla_op *tmla_library_find_op(const tmla_library *library, const char *name);

/* Compute capabilities that the library has kernels for, ascending; 0 where the index is out of range. */
TMLA_API int32_t tmla_library_num_targets(const tmla_library *library);
TMLA_API int32_t tmla_library_target(const tmla_library *library, int32_t index);

/* Operations that the library has kernels for. Null where the index is out of range. */
TMLA_API int32_t tmla_library_num_operations(const tmla_library *library);
TMLA_API const tmla_operation *tmla_library_operation(const tmla_library *library, int32_t index);

/* All kernels. Null where the index is out of range. */
TMLA_API int32_t tmla_library_num_kernels(const tmla_library *library);
TMLA_API const tmla_kernel *tmla_library_kernel(const tmla_library *library, int32_t index);

/* Checks that the library has the operation for element types.
 *
 * attributes: one for each of op->attributes.
 * types: tmla_type of the first `num_types` tensors: inputs, then outputs. */
TMLA_API int32_t tmla_check_types(const tmla_library *library, const tmla_op *op, const tmla_value *attributes,
                                  const int32_t *types, int32_t num_types, tmla_message *message);

/* Element types of the outputs.
 *
 * input_types: tmla_type of each input.
 * output_types: filled with the tmla_type of each output. */
TMLA_API int32_t tmla_output_types(const tmla_library *library, const tmla_op *op, const tmla_value *attributes,
                                   const int32_t *input_types, int32_t *output_types, tmla_message *message);

/* Workspace that is enough for every call whose sizes are at most these, on every part of every target that the
 * library has.
 *
 * input_types: tmla_type of each input.
 * max_shapes: largest shape of each input. */
TMLA_API int32_t tmla_workspace_bytes(const tmla_library *library, const tmla_op *op, const tmla_value *attributes,
                                      const int32_t *input_types, const tmla_shape *max_shapes, int64_t *bytes,
                                      tmla_message *message);

/* Finds the operation that a call is one of.
 *
 * input_types: tmla_type of each input.
 * shapes: shape of each input. Sizes that differ from call to call do not matter here.
 * compute_capability: that of the GPU, 89 for 8.9.
 * operation: set to what was found; it belongs to the library. */
TMLA_API int32_t tmla_find_operation(const tmla_library *library, const tmla_op *op, const tmla_value *attributes,
                                     const int32_t *input_types, const tmla_shape *shapes, int32_t compute_capability,
                                     const tmla_operation **operation, tmla_message *message);

/* Plans a call.
 *
 * operation: what tmla_find_operation found for these attributes and shapes.
 * attributes: one for each of op->attributes.
 * shapes: shape of each input.
 * multiprocessors: those of the GPU.
 * workspace_bytes: size of the workspace that the call has.
 * plan: set to the plan; free it with tmla_plan_free. */
TMLA_API int32_t tmla_plan_create(const tmla_operation *operation, const tmla_value *attributes,
                                  const tmla_shape *shapes, int32_t multiprocessors, int64_t workspace_bytes,
                                  tmla_plan **plan, tmla_message *message);

/* Frees a plan; null is allowed. */
TMLA_API void tmla_plan_free(tmla_plan *plan);

#ifdef __cplusplus
}
#endif

#endif
