package realnode

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process identifies a running program beyond the reuse of its pid.
type process struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"` // clock ticks since boot
}

// nodeEnv is the environment variable that marks every program of a node.
func nodeEnv(p paths) string { return "OCIHOLD_NODE_DIR=" + p.dir }

// Under has a program of the node be run by another from its next start on, one
// that turns into it: Under(Ocihold, "env", "A=B"). Without words it is run as
// ever.
func (n *Node) Under(name string, words ...string) {
	if n.under == nil {
		n.under = map[string][]string{}
	}
	n.under[name] = words
}

// spawn starts a program of the node in a session of its own and records its
// pid. Its output is appended to its log.
func (n *Node) spawn(name string, cmd *exec.Cmd) error {
	log, err := os.OpenFile(n.paths.log(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	if words := n.under[name]; len(words) > 0 {
		if cmd.Path, err = exec.LookPath(words[0]); err != nil {
			return fmt.Errorf("start %s: %w", name, err)
		}
		cmd.Args = slices.Concat(words, cmd.Args)
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = n.DaemonEnv()
	cmd.Dir = n.paths.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	go func() { _ = cmd.Wait() }() // reaps it, should it end before this process does
	start, _, err := procStat(cmd.Process.Pid)
	if err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	record, err := json.Marshal(process{cmd.Process.Pid, start})
	if err != nil {
		return err
	}
	return os.WriteFile(n.paths.pid(name), record, 0o644)
}

// running returns a pidfd of a program of the node, or -1 if it does not run.
// The caller closes it.
func (n *Node) running(name string) (int, error) {
	record, err := os.ReadFile(n.paths.pid(name))
	if errors.Is(err, os.ErrNotExist) {
		return -1, nil
	}
	if err != nil {
		return -1, err
	}
	var p process
	if err := json.Unmarshal(record, &p); err != nil {
		return -1, fmt.Errorf("read %s: %w", n.paths.pid(name), err)
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return -1, nil
	}
	if err != nil {
		return -1, fmt.Errorf("open process %d: %w", p.PID, err)
	}
	start, state, err := procStat(p.PID)
	if err != nil || start != p.StartTime || state == 'Z' || state == 'X' {
		_ = unix.Close(fd)
		return -1, nil //nolint:nilerr // the process has just ended
	}
	return fd, nil
}

// Running tells whether a program of the node runs.
func (n *Node) Running(name string) (bool, error) {
	fd, err := n.running(name)
	if err != nil || fd < 0 {
		return false, err
	}
	return true, unix.Close(fd)
}

// signal sends a signal to a program of the node; one that does not run is left
// alone. Unless the signal merely stops or continues it, or is one that it may
// handle otherwise, its end is waited for.
func (n *Node) signal(ctx context.Context, name string, sig syscall.Signal) error {
	fd, err := n.running(name)
	if err != nil || fd < 0 {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal %s: %w", name, err)
	}
	switch sig {
	case syscall.SIGKILL, syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGABRT, syscall.SIGSEGV:
		if err := waitPidfd(ctx, fd); err != nil {
			return fmt.Errorf("wait for the end of %s: %w", name, err)
		}
	}
	return nil
}

// waitPidfd returns when the process has ended.
func waitPidfd(ctx context.Context, fd int) error {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if n > 0 {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// procStat returns a process's start time and state.
func procStat(pid int) (start uint64, state byte, err error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, err
	}
	// The name, in parentheses, may hold anything.
	_, rest, ok := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return 0, 0, fmt.Errorf("read /proc/%d/stat: too short", pid)
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	return start, fields[0][0], err
}

// poll calls check until it returns nil, and gives its last error when the
// context or the program named ends first.
func (n *Node) poll(ctx context.Context, name string, check func(context.Context) error) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		fd, runErr := n.running(name)
		if runErr != nil {
			return runErr
		}
		if fd < 0 {
			return fmt.Errorf("%s ended at once: %s", name, n.logTail(name))
		}
		_ = unix.Close(fd)
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w: %s", name, err, n.logTail(name))
		case <-tick.C:
		}
	}
}

// logTail returns the end of a program's log, for error messages.
func (n *Node) logTail(name string) string {
	const lines = 25
	log, err := os.ReadFile(n.paths.log(name))
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(log), "\n"), "\n")
	return "the end of " + n.paths.log(name) + ":\n" + strings.Join(all[max(0, len(all)-lines):], "\n")
}
