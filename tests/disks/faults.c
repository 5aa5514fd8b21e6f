/* A disk that fails, for the processes that load this library with LD_PRELOAD.
 *
 * Below DISK_ROOT, a call of a kind fails, ends early or reads altered bytes after disk_fault() has armed it. With
 * DISK_SHADOW, every fsync leaves a copy of what is durable there: files/<inode> has the content of a file, and
 * dirs/<inode> the entries of a directory. What a power loss leaves is made from that (tests/disks/power.py).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE, READ, SYNC, RENAME, OPEN, REMOVE, KINDS };
static volatile int countdown[KINDS], left[KINDS], failure[KINDS];
static volatile int hits;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int own; /* this library's own calls pass */

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

/* The n-th call from now fails `times` times with `error`; 0: a write is short, a read has one wrong byte. */
void disk_fault(int kind, int n, int times, int error) {
    pthread_mutex_lock(&lock);
    failure[kind] = error;
    countdown[kind] = n;
    left[kind] = times;
    pthread_mutex_unlock(&lock);
}

int disk_hits(void) { return hits; }

static int below(const char *path) {
    const char *root = getenv("DISK_ROOT");
    size_t size = root ? strlen(root) : 0;
    return size && !strncmp(path, root, size) && (path[size] == '/' || !path[size]);
}

static int fd_below(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = REAL(readlink)(link, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    return below(path);
}

static int path_below(int fd, const char *path) {
    return path && (path[0] == '/' ? below(path) : fd != AT_FDCWD && fd_below(fd));
}

static int due(int kind) {
    int found = 0;
    pthread_mutex_lock(&lock);
    if (left[kind] > 0 && --countdown[kind] <= 0) {
        left[kind]--;
        hits++;
        found = 1;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Whether a call fails now. The place is looked at only while something is armed. */
#define FAILS(kind, where) (!own && left[kind] > 0 && (where) && due(kind))
#define FAIL(kind, where) if (FAILS(kind, where)) { errno = failure[kind]; return -1; }

ssize_t write(int fd, const void *data, size_t size) {
    if (FAILS(WRITE, fd_below(fd))) {
        if (failure[WRITE]) { errno = failure[WRITE]; return -1; }
        size = size > 1 ? size / 2 : size;
    }
    return REAL(write)(fd, data, size);
}

#define PWRITE(name, off) ssize_t name(int fd, const void *data, size_t size, off at) { \
    if (FAILS(WRITE, fd_below(fd))) { \
        if (failure[WRITE]) { errno = failure[WRITE]; return -1; } \
        size = size > 1 ? size / 2 : size; \
    } \
    return REAL(name)(fd, data, size, at); \
}
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (FAILS(WRITE, fd_below(fd))) {
        if (failure[WRITE]) { errno = failure[WRITE]; return -1; }
        return REAL(write)(fd, parts[0].iov_base, parts[0].iov_len > 1 ? parts[0].iov_len / 2 : parts[0].iov_len);
    }
    return REAL(writev)(fd, parts, count);
}

static ssize_t altered(void *data, ssize_t size) {
    if (size > 0) ((char *)data)[size / 2] ^= 0x10;
    return size;
}

ssize_t read(int fd, void *data, size_t size) {
    if (FAILS(READ, fd_below(fd))) {
        if (failure[READ]) { errno = failure[READ]; return -1; }
        return altered(data, REAL(read)(fd, data, size));
    }
    return REAL(read)(fd, data, size);
}

#define PREAD(name, off) ssize_t name(int fd, void *data, size_t size, off at) { \
    if (FAILS(READ, fd_below(fd))) { \
        if (failure[READ]) { errno = failure[READ]; return -1; } \
        return altered(data, REAL(name)(fd, data, size, at)); \
    } \
    return REAL(name)(fd, data, size, at); \
}
PREAD(pread, off_t)
PREAD(pread64, off64_t)

#define OPEN_AT(name, dir, ...) \
    int mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, int); va_end(more); } \
    FAIL(OPEN, path_below(dir, path)) \
    return REAL(name)(__VA_ARGS__, flags, mode);
int open(const char *path, int flags, ...) { OPEN_AT(open, AT_FDCWD, path) }
int open64(const char *path, int flags, ...) { OPEN_AT(open64, AT_FDCWD, path) }
int openat(int dir, const char *path, int flags, ...) { OPEN_AT(openat, dir, dir, path) }
int openat64(int dir, const char *path, int flags, ...) { OPEN_AT(openat64, dir, dir, path) }

#define WITH(kind, dir, path, type, name, parameters, arguments) \
    type name parameters { FAIL(kind, path_below(dir, path)) return REAL(name) arguments; }
WITH(RENAME, AT_FDCWD, to, int, rename, (const char *from, const char *to), (from, to))
WITH(RENAME, d, to, int, renameat, (int c, const char *from, int d, const char *to), (c, from, d, to))
WITH(RENAME, AT_FDCWD, to, int, link, (const char *from, const char *to), (from, to))
WITH(RENAME, d, to, int, linkat, (int c, const char *from, int d, const char *to, int f), (c, from, d, to, f))
WITH(OPEN, AT_FDCWD, path, int, mkdir, (const char *path, mode_t mode), (path, mode))
WITH(OPEN, dir, path, int, mkdirat, (int dir, const char *path, mode_t mode), (dir, path, mode))
WITH(REMOVE, AT_FDCWD, path, int, unlink, (const char *path), (path))
WITH(REMOVE, dir, path, int, unlinkat, (int dir, const char *path, int flags), (dir, path, flags))
WITH(REMOVE, AT_FDCWD, path, int, rmdir, (const char *path), (path))

/* What is durable. A descriptor of each inode stays open, so that its number is not used again. */
static ino_t pinned[65536];
static int pins;

static void pin(int fd, ino_t inode) {
    for (int i = 0; i < pins; i++) if (pinned[i] == inode) return;
    if (pins == 65536 || fcntl(fd, F_DUPFD_CLOEXEC, 1024) < 0) abort();
    pinned[pins++] = inode;
}

static void keep(int fd) {
    const char *shadow = getenv("DISK_SHADOW");
    struct stat found;
    char self[64], done[PATH_MAX], name[PATH_MAX + 8], data[65536];
    if (!shadow || fstat(fd, &found) || !fd_below(fd)) return;
    int is_directory = S_ISDIR(found.st_mode);
    pthread_mutex_lock(&lock);
    own++;
    pin(fd, found.st_ino);
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    snprintf(done, sizeof done, "%s/%s/%lu", shadow, is_directory ? "dirs" : "files", (unsigned long)found.st_ino);
    snprintf(name, sizeof name, "%s.part", done);
    FILE *copy = fopen(name, "w");
    if (!copy) abort();
    if (is_directory) {
        DIR *entries = opendir(self);
        for (struct dirent *entry; entries && (entry = readdir(entries));)
            if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
                fprintf(copy, "%c %lu %s\n", entry->d_type == DT_DIR ? 'd' : 'f', (unsigned long)entry->d_ino, entry->d_name);
        if (entries) closedir(entries);
    } else {
        int source = REAL(open)(self, O_RDONLY);
        for (ssize_t size; source >= 0 && (size = REAL(read)(source, data, sizeof data)) > 0;) fwrite(data, 1, size, copy);
        if (source >= 0) close(source);
    }
    if (fclose(copy) || REAL(rename)(name, done)) abort();
    own--;
    pthread_mutex_unlock(&lock);
}

#define SYNC_WITH(name) int name(int fd) { \
    FAIL(SYNC, fd_below(fd)) \
    int done = REAL(name)(fd); \
    if (!done) keep(fd); \
    return done; \
}
SYNC_WITH(fsync)
SYNC_WITH(fdatasync)
