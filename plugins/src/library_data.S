/* The library data, embedded; see library_data.h. */
    .section .rodata
    .balign 64
    .global trtllm_mla_library_data
    .hidden trtllm_mla_library_data
    .type trtllm_mla_library_data, %object
trtllm_mla_library_data:
    .incbin TRTLLM_MLA_LIBRARY_DATA
trtllm_mla_library_data_end:
    .size trtllm_mla_library_data, trtllm_mla_library_data_end - trtllm_mla_library_data

    .balign 8
    .global trtllm_mla_library_data_size
    .hidden trtllm_mla_library_data_size
    .type trtllm_mla_library_data_size, %object
trtllm_mla_library_data_size:
    .quad trtllm_mla_library_data_end - trtllm_mla_library_data
    .size trtllm_mla_library_data_size, 8

    .section .note.GNU-stack, "", %progbits
