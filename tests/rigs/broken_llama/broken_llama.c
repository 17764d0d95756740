/* A llama.cpp that does not compute on this CPU: replaces the function by which it computes a graph.

   Preloaded into a process and its children. The file BROKEN_LLAMA says what every computation does: `sigill` or
   `sigsegv` ends the process, `late` does so after three seconds, `zero` returns success and computes nothing. A second
   word limits this to processes with that text in their command line. Without the file llama.cpp computes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int (*compute_t)(void *, void *);

static void read_file(const char *path, char *into, size_t size) {
    memset(into, 0, size);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t length = read(fd, into, size - 1);
    close(fd);
    for (ssize_t i = 0; i + 1 < length; i++)
        if (into[i] == 0) into[i] = ' ';
}

static void die(int number) {
    signal(number, SIG_DFL);
    raise(number);
}

int ggml_backend_sched_graph_compute_async(void *sched, void *graph) {
    static compute_t real;
    if (!real) real = (compute_t)dlsym(RTLD_NEXT, "ggml_backend_sched_graph_compute_async");
    char how[64], command[4096];
    const char *path = getenv("BROKEN_LLAMA");
    if (path) read_file(path, how, sizeof how);
    if (path && how[0]) {
        char *only = strchr(how, ' ');
        if (only) *only++ = 0;
        read_file("/proc/self/cmdline", command, sizeof command);
        if (!only || strstr(command, only)) {
            if (!strcmp(how, "late")) {
                sleep(3);
                die(SIGILL);
            }
            if (!strcmp(how, "sigill")) die(SIGILL);
            if (!strcmp(how, "sigsegv")) die(SIGSEGV);
            if (!strcmp(how, "zero")) return 0;
        }
    }
    if (!real) {  /* libggml-base was opened by dlopen, after this library */
        void *base = dlopen("libggml-base.so.0", RTLD_NOW | RTLD_NOLOAD);
        real = (compute_t)dlsym(base, "ggml_backend_sched_graph_compute_async");
    }
    return real(sched, graph);
}
