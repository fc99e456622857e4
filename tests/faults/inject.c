// Runs a command and makes one of its system calls fail, or kills a process at it.
//
//     inject CALLS N ACTION REPORT PREFIX... -- COMMAND...
//
// CALLS   classes of system calls, separated by commas: open read write sync rename mkdir unlink list map truncate stat
//         close thread. The calls of a class are in the table below.
// N       the call at which it happens, counted from 1 over all processes and threads of the command; 0: every one.
// ACTION  the number of an error; or kill-caller, kill-rank, kill-launcher, kill-all; or count, which does nothing.
// REPORT  a file that gets one line: how many calls matched, and what was done at which one.
// PREFIX  a call counts where its path, or the path of its descriptor, begins with one of these, or is it where it is =PATH.
//
// The filter is seccomp's with a listener (SECCOMP_RET_USER_NOTIF, Linux 5.5), so that it sees every call whoever makes it:
// libc, or code that enters the kernel by itself; and so do the processes that the command starts. An LD_PRELOAD library
// would miss the second kind. Needs no rights. Exit code: the command's; 128 + n after signal n; 97 where a process of the
// command was still there 10 s after it; 98 where the system has no such filter.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { NO_FILTER = 98, LEFT_BEHIND = 97 };

// Where a call's path is: in the argument `path`, relative to the descriptor in `folder`; or that of the descriptor in `fd`.
// -1: no such argument.
struct call { const char *class; int number; int fd, folder, path; };
static const struct call CALLS[] = {
    {"open", SYS_openat, -1, 0, 1},
    {"read", SYS_read, 0, -1, -1}, {"read", SYS_pread64, 0, -1, -1}, {"read", SYS_readv, 0, -1, -1}, {"read", SYS_preadv, 0, -1, -1},
    {"write", SYS_write, 0, -1, -1}, {"write", SYS_pwrite64, 0, -1, -1}, {"write", SYS_writev, 0, -1, -1}, {"write", SYS_pwritev, 0, -1, -1},
    {"write", SYS_copy_file_range, 2, -1, -1}, {"write", SYS_sendfile, 0, -1, -1},
    {"sync", SYS_fsync, 0, -1, -1}, {"sync", SYS_fdatasync, 0, -1, -1}, {"sync", SYS_sync_file_range, 0, -1, -1},
    {"rename", SYS_renameat, -1, 0, 1}, {"rename", SYS_renameat2, -1, 0, 1},
    {"mkdir", SYS_mkdirat, -1, 0, 1},
    {"unlink", SYS_unlinkat, -1, 0, 1},
    {"list", SYS_getdents64, 0, -1, -1},
    {"map", SYS_mmap, 4, -1, -1},
    {"truncate", SYS_ftruncate, 0, -1, -1}, {"truncate", SYS_fallocate, 0, -1, -1},
    {"stat", SYS_statx, -1, 0, 1}, {"stat", SYS_newfstatat, -1, 0, 1}, {"stat", SYS_fstat, 0, -1, -1},
    {"close", SYS_close, 0, -1, -1},
    {"thread", SYS_clone3, -1, -1, -1}, {"thread", SYS_clone, -1, -1, -1},
#ifdef SYS_open
    // Calls that only older architectures have.
    {"open", SYS_open, -1, -1, 0}, {"rename", SYS_rename, -1, -1, 0}, {"mkdir", SYS_mkdir, -1, -1, 0}, {"unlink", SYS_unlink, -1, -1, 0},
    {"unlink", SYS_rmdir, -1, -1, 0}, {"stat", SYS_stat, -1, -1, 0}, {"stat", SYS_lstat, -1, -1, 0},
#endif
};
enum { KNOWN = sizeof CALLS / sizeof *CALLS };

static void die(const char *what) { perror(what); exit(NO_FILTER); }

static int is_chosen(const char *classes, const char *class) {
    size_t length = strlen(class);
    for (const char *at = classes; (at = strstr(at, class)); at += length) {
        int starts = at == classes || at[-1] == ',', ends = at[length] == ',' || at[length] == 0;
        if (starts && ends) return 1;
    }
    return 0;
}

// Installs the filter in this process and gives the listener.
static int filter(const char *classes) {
    struct sock_filter code[2 * KNOWN + 2];
    unsigned short at = 0;
    code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < KNOWN; i++) {
        if (!is_chosen(classes, CALLS[i].class)) continue;
        code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)CALLS[i].number, 0, 1);
        code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF);
    }
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {at, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) die("no_new_privs");
    int listener = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
    if (listener < 0) die("seccomp");
    return listener;
}

static void hand_over(int socket, int descriptor) {
    char byte = 0, space[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
    if (sendmsg(socket, &message, 0) < 0) die("sendmsg");
}

static int receive(int socket) {
    char byte, space[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    if (recvmsg(socket, &message, 0) <= 0 || !CMSG_FIRSTHDR(&message)) exit(NO_FILTER);
    int descriptor;
    memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
    return descriptor;
}

static int link_of(unsigned process, const char *what, long long descriptor, char *path, size_t room) {
    char link[64];
    if (descriptor < 0) snprintf(link, sizeof link, "/proc/%u/%s", process, what);
    else snprintf(link, sizeof link, "/proc/%u/%s/%lld", process, what, descriptor);
    ssize_t length = readlink(link, path, room - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0;
}

static size_t peek(unsigned process, unsigned long long address, void *into, size_t bytes) {
    // One page at a time: what follows may not be there.
    size_t before = 4096 - address % 4096, first = before < bytes ? before : bytes;
    struct iovec here[2] = {{into, first}, {(char *)into + first, bytes - first}};
    struct iovec there[2] = {{(void *)address, first}, {(void *)(address + first), bytes - first}};
    ssize_t read = process_vm_readv((pid_t)process, here, 2, there, 2, 0);
    return read < 0 ? 0 : (size_t)read;
}

static void path_of(const struct call *call, const struct seccomp_notif *asked, char *path, size_t room) {
    const __u64 *arguments = asked->data.args;
    path[0] = 0;
    if (call->path >= 0) {
        char given[2048];
        size_t read = peek(asked->pid, arguments[call->path], given, sizeof given - 1);
        given[read] = 0;
        int folder = call->folder < 0 ? AT_FDCWD : (int)arguments[call->folder];
        if (given[0] == '/') { snprintf(path, room, "%s", given); return; }
        char base[2048];
        if (folder == AT_FDCWD) link_of(asked->pid, "cwd", -1, base, sizeof base);
        else link_of(asked->pid, "fd", folder, base, sizeof base);
        if (given[0]) snprintf(path, room, "%s/%s", base, given);
        else snprintf(path, room, "%s", base);
    } else if (call->fd >= 0) {
        link_of(asked->pid, "fd", (int)arguments[call->fd], path, room);
    }
}

static int matches(const struct call *call, const struct seccomp_notif *asked, char **prefixes, char *path, size_t room) {
    const __u64 *arguments = asked->data.args;
    if (call->number == SYS_clone3 || call->number == SYS_clone) {
        __u64 flags = arguments[0];
        if (call->number == SYS_clone3 && peek(asked->pid, arguments[0], &flags, sizeof flags) != sizeof flags) return 0;
        snprintf(path, room, "a thread");
        return (flags & CLONE_THREAD) != 0;
    }
    if (call->number == SYS_mmap && (arguments[3] & MAP_ANONYMOUS)) {
        // An arena. All else without a file is the allocator's, which ends the process where it gets nothing, or a stack's.
        snprintf(path, room, "memory");
        return (arguments[3] & MAP_NORESERVE) && (arguments[2] & PROT_WRITE);
    }
    path_of(call, asked, path, room);
    struct stat found;
    // std panics where a folder that was listed cannot be closed.
    if (call->number == SYS_close && !stat(path, &found) && S_ISDIR(found.st_mode)) return 0;
    if (call->number == SYS_mmap && !strncmp(path, "/memfd:", 7)) return 1;
    for (char **prefix = prefixes; *prefix; prefix++)
        if (**prefix == '=' ? !strcmp(path, *prefix + 1) : !strncmp(path, *prefix, strlen(*prefix))) return 1;
    return 0;
}

static pid_t field(unsigned process, const char *name) {
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%u/status", process);
    FILE *file = fopen(path, "r");
    long value = 0;
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, name, strlen(name))) value = atol(line + strlen(name));
    if (file) fclose(file);
    return (pid_t)value;
}

// Some rank: the caller where it is one, else the first process that the launcher started.
static pid_t a_rank(pid_t caller, pid_t launcher) {
    if (caller != launcher) return caller;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", launcher, launcher);
    FILE *file = fopen(path, "r");
    int child = launcher;
    if (file && fscanf(file, "%d", &child) != 1) child = launcher;
    if (file) fclose(file);
    return child;
}

static void act(const char *action, pid_t caller, pid_t launcher) {
    if (!strcmp(action, "kill-caller")) kill(caller, SIGKILL);
    else if (!strcmp(action, "kill-rank")) kill(a_rank(caller, launcher), SIGKILL);
    else if (!strcmp(action, "kill-launcher")) kill(launcher, SIGKILL);
    else if (!strcmp(action, "kill-all")) kill(-launcher, SIGKILL);
}

int main(int count, char **words) {
    int split = 5;
    while (split < count && strcmp(words[split], "--")) split++;
    if (split + 1 >= count) { fprintf(stderr, "usage: inject CALLS N ACTION REPORT PREFIX... -- COMMAND...\n"); return 2; }
    const char *classes = words[1], *action = words[3], *report = words[4];
    long long when = atoll(words[2]), seen = 0;
    char **prefixes = words + 5, hit[4200] = "nothing";
    words[split] = NULL;
    int sockets[2], error = atoi(action);
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets)) die("socketpair");
    pid_t parent = getpid(), launcher = fork();
    if (launcher == 0) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(NO_FILTER);
        hand_over(sockets[1], filter(classes));
        execv(words[split + 1], words + split + 1);
        die(words[split + 1]);
    }
    close(sockets[1]);
    int listener = receive(sockets[0]), status = 0, has_ended = 0;
    struct timespec ended = {0};
    for (;;) {
        struct pollfd look = {.fd = listener, .events = POLLIN};
        poll(&look, 1, 20);
        if (!has_ended && waitpid(launcher, &status, WNOHANG) == launcher) {
            has_ended = 1;
            clock_gettime(CLOCK_MONOTONIC, &ended);
        }
        if (look.revents & POLLIN) {
            struct seccomp_notif asked = {0};
            struct seccomp_notif_resp answer = {0};
            if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &asked)) continue;
            answer.id = asked.id;
            answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
            const struct call *call = CALLS;
            while (call < CALLS + KNOWN && call->number != asked.data.nr) call++;
            char path[4096];
            if (call < CALLS + KNOWN && matches(call, &asked, prefixes, path, sizeof path) && (++seen == when || when == 0)) {
                pid_t caller = field(asked.pid, "Tgid:");
                snprintf(hit, sizeof hit, "%s by %s of %s", call->class, caller == launcher ? "launcher" : "rank", path);
                if (error) answer.flags = 0, answer.error = -error;
                else act(action, caller, launcher);
            }
            // The caller may be gone by now.
            ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);
        } else if (look.revents & POLLHUP) {
            break;
        } else if (has_ended) {
            struct timespec now;
            clock_gettime(CLOCK_MONOTONIC, &now);
            if (now.tv_sec - ended.tv_sec > 10) {
                kill(-launcher, SIGKILL);
                return LEFT_BEHIND;
            }
        }
    }
    if (!has_ended) waitpid(launcher, &status, 0);
    FILE *file = fopen(report, "w");
    if (file) { fprintf(file, "%lld %s\n", seen, hit); fclose(file); }
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
