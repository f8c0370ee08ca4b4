/* Rows with neon. */

#if defined(__aarch64__)
#define WITH_NEON
#define NAME(x) x##_neon
#include "rows.h"
#endif
