/* What the C programs of these tests share: a check that says where and why, and an end to every hang. */
#ifndef CHECK_H
#define CHECK_H

#include "flexring.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                        \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);             \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)

/* The call succeeds. */
#define WORKS(call) EXPECT(FLEXRING_SUCCESS, "", call)

/* The call gives this code, and, if it fails, a sentence with these words. */
#define EXPECT(code, words, call)                                                               \
    do {                                                                                        \
        flexring_result result_ = (call);                                                       \
        if (result_ != (code)) {                                                                \
            fprintf(stderr, "%s:%d: %s returned %d and not %s: %s\n", __FILE__, __LINE__,       \
                    #call, (int)result_, #code, flexring_last_error());                         \
            exit(1);                                                                            \
        }                                                                                       \
        if (result_ != FLEXRING_SUCCESS && !strstr(flexring_last_error(), (words))) {           \
            fprintf(stderr, "%s:%d: %s does not say \"%s\" but \"%s\"\n", __FILE__, __LINE__,   \
                    #call, (words), flexring_last_error());                                     \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)

#endif
