/* Fails system calls on files below a folder: `cc -shared -fPIC -o shim.so shim.c -ldl`, preloaded.

   SHIM = "FOLDER CALL ERRNO FIRST LAST": calls FIRST to LAST of this kind (from 1) in a process fail
   with ERRNO; 0 lets flock pretend that it has locked. A line of SHIM_LOG names each failed call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int count;

static int fails(const char *call, const char *path) {
    char folder[4096], kind[16], line[4200];
    int number, first, last;
    const char *asked = getenv("SHIM"), *log = getenv("SHIM_LOG");
    if (!asked || sscanf(asked, "%4095s %15s %d %d %d", folder, kind, &number, &first, &last) != 5)
        return 0;
    if (strcmp(kind, call) || strncmp(path, folder, strlen(folder)))
        return 0;
    int now = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (now < first || now > last)
        return 0;
    if (log) {
        int file = NEXT(open)(log, O_WRONLY | O_CREAT | O_APPEND, 0666);
        int length = snprintf(line, sizeof line, "%s %s\n", call, path);
        if (NEXT(write)(file, line, length) < 0)
            abort();
        NEXT(close)(file);
    }
    errno = number;
    return 1;
}

static int fails_at(const char *call, int folder, const char *path) {
    char where[4096] = "", whole[8300];
    if (path[0] == '/')
        return fails(call, path);
    if (folder == AT_FDCWD) {
        if (!getcwd(where, sizeof where))
            return 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        if (readlink(link, where, sizeof where - 1) < 0)
            return 0;
    }
    snprintf(whole, sizeof whole, "%s/%s", where, path);
    return fails(call, whole);
}

static int fails_fd(const char *call, int file) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    return readlink(link, path, sizeof path - 1) > 0 && fails(call, path);
}

#define OPENS(name, fd, signature, ...)                          \
    int name signature {                                         \
        va_list rest;                                            \
        va_start(rest, flags);                                   \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; \
        va_end(rest);                                            \
        return fails_at("open", fd, path) ? -1 : NEXT(name)(__VA_ARGS__); \
    }
OPENS(open, AT_FDCWD, (const char *path, int flags, ...), path, flags, mode)
OPENS(open64, AT_FDCWD, (const char *path, int flags, ...), path, flags, mode)
OPENS(openat, folder, (int folder, const char *path, int flags, ...), folder, path, flags, mode)
OPENS(openat64, folder, (int folder, const char *path, int flags, ...), folder, path, flags, mode)

#define ON_FD(type, name, call, signature, ...) \
    type name signature { return fails_fd(call, file) ? -1 : NEXT(name)(__VA_ARGS__); }
ON_FD(ssize_t, write, "write", (int file, const void *data, size_t size), file, data, size)
ON_FD(ssize_t, pwrite, "write", (int file, const void *data, size_t size, off_t at), file, data, size, at)
ON_FD(ssize_t, pwrite64, "write", (int file, const void *data, size_t size, off64_t at), file, data, size, at)
ON_FD(ssize_t, read, "read", (int file, void *data, size_t size), file, data, size)
ON_FD(ssize_t, pread, "read", (int file, void *data, size_t size, off_t at), file, data, size, at)
ON_FD(ssize_t, pread64, "read", (int file, void *data, size_t size, off64_t at), file, data, size, at)
ON_FD(int, fsync, "fsync", (int file), file)
ON_FD(int, ftruncate, "write", (int file, off_t size), file, size)

int flock(int file, int what) {
    if (!fails_fd("flock", file))
        return NEXT(flock)(file, what);
    return errno ? -1 : 0;
}
int close(int file) {
    int failed = fails_fd("close", file), number = errno;
    int done = NEXT(close)(file);
    errno = failed ? number : errno;
    return failed ? -1 : done;
}
int mkdir(const char *path, mode_t mode) {
    return fails_at("mkdir", AT_FDCWD, path) ? -1 : NEXT(mkdir)(path, mode);
}
int unlink(const char *path) { return fails_at("unlink", AT_FDCWD, path) ? -1 : NEXT(unlink)(path); }
int link(const char *old, const char *new) {
    return fails_at("link", AT_FDCWD, new) ? -1 : NEXT(link)(old, new);
}
int linkat(int from, const char *old, int folder, const char *new, int flags) {
    return fails_at("link", folder, new) ? -1 : NEXT(linkat)(from, old, folder, new, flags);
}
int rename(const char *old, const char *new) {
    return fails_at("rename", AT_FDCWD, new) ? -1 : NEXT(rename)(old, new);
}
