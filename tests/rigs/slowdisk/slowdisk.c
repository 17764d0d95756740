/* Slows every read of a *.gguf file to SLOWDISK_BYTES_PER_SECOND; preloaded into a process, changes nothing else. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static double bytes_per_second(void) {
    const char *text = getenv("SLOWDISK_BYTES_PER_SECOND");
    return text ? atof(text) : 0.0;
}

static int is_gguf(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 5) return 0;
    path[length] = 0;
    return strcmp(path + length - 5, ".gguf") == 0;
}

static void delay(int fd, double bytes) {
    double rate = bytes_per_second();
    if (rate <= 0 || bytes <= 0) return;
    int saved = errno;
    if (is_gguf(fd)) {
        double seconds = bytes / rate;
        struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
        while (nanosleep(&left, &left) != 0 && errno == EINTR) continue;
    }
    errno = saved;
}

#define REAL(type, name) static type real; if (!real) real = (type)dlsym(RTLD_NEXT, name)

typedef size_t (*fread_t)(void *, size_t, size_t, FILE *);
size_t fread(void *out, size_t size, size_t count, FILE *file) {
    REAL(fread_t, "fread");
    size_t done = real(out, size, count, file);
    delay(fileno(file), (double)done * (double)size);
    return done;
}

typedef ssize_t (*read_t)(int, void *, size_t);
ssize_t read(int fd, void *out, size_t size) {
    REAL(read_t, "read");
    ssize_t done = real(fd, out, size);
    delay(fd, (double)done);
    return done;
}

typedef ssize_t (*pread_t)(int, void *, size_t, off_t);
ssize_t pread(int fd, void *out, size_t size, off_t offset) {
    REAL(pread_t, "pread");
    ssize_t done = real(fd, out, size, offset);
    delay(fd, (double)done);
    return done;
}
ssize_t pread64(int fd, void *out, size_t size, off_t offset) { return pread(fd, out, size, offset); }

typedef void *(*mmap_t)(void *, size_t, int, int, int, off_t);
void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    REAL(mmap_t, "mmap");
    void *done = real(at, size, protection, flags, fd, offset);
    if (fd >= 0 && done != MAP_FAILED) delay(fd, (double)size); /* its page faults, paid at once */
    return done;
}
