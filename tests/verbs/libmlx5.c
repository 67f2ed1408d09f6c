// What flexring uses of libmlx5, for the adapters of `libibverbs.c`.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>

static void *adapters(const char *name) { return dlsym(dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD), name); }

int mlx5dv_get_data_direct_sysfs_path(struct ibv_context *context, char *path, size_t length) {
    int (*has)(struct ibv_context *) = (int (*)(struct ibv_context *))adapters("fake_has_data_direct");
    if (!has(context) || !length) return EOPNOTSUPP;
    *path = 0;
    return 0;
}

struct ibv_mr *mlx5dv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t address, int fd, int access, int mlx5_access) {
    typedef struct ibv_mr *(*call)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int, int);
    return ((call)adapters("fake_reg_dmabuf_mr"))(pd, offset, length, address, fd, access, mlx5_access & 1);
}
