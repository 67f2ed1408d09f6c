/* Runs a program in which the kernel refuses memfd_create, as a seccomp profile of a container may.
 *
 *     refuse_memfd EPERM|ENOSYS shm|nothing PROGRAM [ARGUMENT]...
 *
 * With `nothing`, files without a name are refused as well, so no other memory can be shared, either.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define UNLESS(condition, value, skip) BPF_JUMP(BPF_JMP | condition | BPF_K, value, 0, skip)
#define RETURN(action) BPF_STMT(BPF_RET | BPF_K, action)

int main(int argc, char **argv) {
    if (argc < 4)
        return 2;
    unsigned refusal = SECCOMP_RET_ERRNO | (strcmp(argv[1], "ENOSYS") == 0 ? ENOSYS : EPERM);
    unsigned no_file = strcmp(argv[2], "nothing") == 0 ? SECCOMP_RET_ERRNO | EOPNOTSUPP : SECCOMP_RET_ALLOW;
    struct sock_filter filter[] = {
        LOAD(nr),
        UNLESS(BPF_JEQ, SYS_memfd_create, 1),
        RETURN(refusal),
        UNLESS(BPF_JEQ, SYS_openat, 3),
        LOAD(args[2]),
        UNLESS(BPF_JSET, O_TMPFILE & ~O_DIRECTORY, 1),
        RETURN(no_file),
#ifdef SYS_open
        LOAD(nr),
        UNLESS(BPF_JEQ, SYS_open, 3),
        LOAD(args[1]),
        UNLESS(BPF_JSET, O_TMPFILE & ~O_DIRECTORY, 1),
        RETURN(no_file),
#endif
        RETURN(SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
        perror("seccomp");
        return 3;
    }
    execv(argv[3], argv + 3);
    perror(argv[3]);
    return 4;
}
