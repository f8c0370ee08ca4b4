/* Rows with plain. */

#if 1
#define NAME(x) x##_plain
#include "rows.h"
#endif
