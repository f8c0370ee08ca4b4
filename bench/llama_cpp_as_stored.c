/* Loaded before llama.cpp (LD_PRELOAD), this keeps it from repacking weights into memory of its own, as `--no-repack`
   of its programs does: what does not fit stays in the file. For release 0.5.0 of node-llama-cpp, which has no option. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct llama_model_params { /* include/llama.h of that release */
    const void *devices, *overrides;
    int32_t layers, split, load, lazy, main;
    const void *shares, *progress, *data, *values;
    _Bool vocabulary, check, use_extra_bufts, no_host, no_alloc, load_mtp;
};

struct llama_model_params llama_model_default_params(void) {
    void *library = dlopen("libllama.v0.5.0.so", RTLD_NOW | RTLD_NOLOAD);
    struct llama_model_params (*defaults)(void) = library ? dlsym(library, "llama_model_default_params") : NULL;
    struct llama_model_params given;
    if (!defaults || !(given = defaults()).use_extra_bufts) {
        fputs("this is another release of llama.cpp\n", stderr);
        exit(1);
    }
    given.use_extra_bufts = 0;
    return given;
}
