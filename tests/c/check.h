/* Checks for the C programs of these tests. A check that fails prints its location and ends the program. */
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
            fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition);       \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)

/* The call succeeds. */
#define WORKS(call) EXPECT(FLEXRING_SUCCESS, "", call)

/* The call returns this code and, if it fails, a message that contains `phrase`. */
#define EXPECT(code, phrase, call)                                                              \
    do {                                                                                        \
        flexring_result result_ = (call);                                                       \
        if (result_ != (code)) {                                                                \
            fprintf(stderr, "%s:%d: %s returned %d and not %s: %s\n", __FILE__, __LINE__,       \
                    #call, (int)result_, #code, flexring_last_error());                         \
            exit(1);                                                                            \
        }                                                                                       \
        if (result_ != FLEXRING_SUCCESS && !strstr(flexring_last_error(), (phrase))) {          \
            fprintf(stderr, "%s:%d: the message of %s lacks \"%s\": \"%s\"\n",                  \
                    __FILE__, __LINE__, #call, (phrase), flexring_last_error());                \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)

#endif
