/* Refuses writes to files below FULLDISK_DIR with ENOSPC while the file FULLDISK_FLAG exists; counts what it refused.

   Preloaded into a process and its children; changes nothing else. One byte per refusal goes to FULLDISK_COUNT. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(type, name) static type real; if (!real) real = (type)dlsym(RTLD_NEXT, name)

typedef ssize_t (*write_t)(int, const void *, size_t);

static ssize_t really_write(int fd, const void *from, size_t size) {
    REAL(write_t, "write");
    return real(fd, from, size);
}

/* Whether the disk behind fd is full; errno is set then. */
static int is_full(int fd) {
    const char *flag = getenv("FULLDISK_FLAG"), *directory = getenv("FULLDISK_DIR");
    const char *count = getenv("FULLDISK_COUNT");
    int saved = errno;
    if (!flag || !directory || access(flag, F_OK) != 0) {
        errno = saved;
        return 0;
    }
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, directory, strlen(directory)) != 0) return 0;
    int counter = count ? open(count, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (counter >= 0) {
        if (really_write(counter, "x", 1) != 1) fputs("fulldisk cannot count\n", stderr);
        close(counter);
    }
    errno = ENOSPC;
    return 1;
}

ssize_t write(int fd, const void *from, size_t size) { return is_full(fd) ? -1 : really_write(fd, from, size); }

typedef ssize_t (*writev_t)(int, const struct iovec *, int);
ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev_t, "writev");
    return is_full(fd) ? -1 : real(fd, parts, count);
}

typedef ssize_t (*pwrite_t)(int, const void *, size_t, off_t);
ssize_t pwrite(int fd, const void *from, size_t size, off_t at) {
    REAL(pwrite_t, "pwrite");
    return is_full(fd) ? -1 : real(fd, from, size, at);
}
ssize_t pwrite64(int fd, const void *from, size_t size, off_t at) { return pwrite(fd, from, size, at); }
