package realnode

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// How long Down waits for each step before it goes on by force.
const (
	politeLimit = 20 * time.Second
	sweepLimit  = 20 * time.Second
)

// Down ends the node in a directory and leaves no process, mount, cgroup or
// network namespace of it; files stay. It works whatever still runs: a node that
// is half up, crashed, or down already.
func Down(ctx context.Context, dir string) error {
	p, err := newPaths(dir)
	if err != nil {
		return err
	}
	n := &Node{paths: p}
	// Without a readable record the sweep alone has to do.
	if content, err := os.ReadFile(p.state()); err == nil {
		_ = json.Unmarshal(content, &n.state)
	}
	n.endPods(ctx)
	for _, name := range []string{Ocihold, CRIO, Proxy, Registry} {
		// A stopped program would not hear the request to end.
		_ = n.signal(ctx, name, syscall.SIGCONT)
		stop, cancel := context.WithTimeout(ctx, politeLimit)
		err := n.signal(stop, name, syscall.SIGTERM)
		cancel()
		if err != nil {
			err = n.signal(ctx, name, syscall.SIGKILL)
		}
		if err != nil {
			return err
		}
		_ = os.Remove(p.pid(name))
	}
	ctx, cancel := context.WithTimeout(ctx, sweepLimit)
	defer cancel()
	if err := p.endProcesses(ctx); err != nil {
		return err
	}
	if err := p.unmountAll(); err != nil {
		return err
	}
	return p.removeCgroups(ctx)
}

// endPods removes the pods by CRI-O, so that their exit is seen by all. What
// does not work is left to the sweep.
func (n *Node) endPods(ctx context.Context) {
	fd, err := n.running(CRIO)
	if err != nil || fd < 0 {
		return
	}
	_ = unix.Close(fd)
	ctx, cancel := context.WithTimeout(ctx, politeLimit)
	defer cancel()
	if n.dial() != nil {
		return
	}
	defer n.Close()
	_ = n.removePods(ctx)
}

// endProcesses kills every process of the node until there is none.
func (p paths) endProcesses(ctx context.Context) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		pids, err := p.processes()
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("kill process %d of the node: %w", pid, err)
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("end the processes %v of the node: %w", pids, ctx.Err())
		case <-tick.C:
		}
	}
}

// processes finds the node's processes: those that carry its environment, those
// in its cgroups, and those whose root is a container of its storage.
func (p paths) processes() ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if p.owns(pid) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// owns tells whether a process belongs to the node. One that ends meanwhile, or
// has ended and waits to be reaped, does not.
func (p paths) owns(pid int) bool {
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	if _, state, err := procStat(pid); err != nil || state == 'Z' {
		return false
	}
	environ, _ := os.ReadFile(filepath.Join(proc, "environ"))
	if slices.Contains(strings.Split(string(environ), "\x00"), nodeEnv(p)) {
		return true
	}
	cgroups, _ := os.ReadFile(filepath.Join(proc, "cgroup"))
	if strings.Contains(string(cgroups), ":"+p.cgroupParent()+"/") {
		return true
	}
	mounts, _ := os.ReadFile(filepath.Join(proc, "mountinfo"))
	for m := range parseMounts(mounts) {
		if m.point == "/" && strings.Contains(m.options, "upperdir="+p.crioRoot()+"/") {
			return true
		}
	}
	return false
}

// mount is one line of a mountinfo file.
type mount struct {
	point, kind, source, options string
}

// parseMounts yields the mounts of a mountinfo file in their order.
func parseMounts(mountinfo []byte) func(func(mount) bool) {
	return func(yield func(mount) bool) {
		lines := bufio.NewScanner(bytes.NewReader(mountinfo))
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			before, after, ok := strings.Cut(lines.Text(), " - ")
			left, right := strings.Fields(before), strings.Fields(after)
			if !ok || len(left) < 5 || len(right) < 3 {
				continue
			}
			m := mount{point: unescape(left[4]), kind: right[0], source: right[1], options: unescape(right[2])}
			if !yield(m) {
				return
			}
		}
	}
}

var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace

// mountsBelow lists the mount points below a directory, in mount order.
func mountsBelow(dir string) ([]string, error) {
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var points []string
	for m := range parseMounts(mountinfo) {
		if strings.HasPrefix(m.point, dir+"/") {
			points = append(points, m.point)
		}
	}
	return points, nil
}

// unmountAll detaches every mount below the node's directory, pinned namespaces
// among them.
func (p paths) unmountAll() error {
	points, err := mountsBelow(p.dir)
	if err != nil {
		return err
	}
	slices.Reverse(points)
	for _, point := range points {
		err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		// EINVAL, ENOENT: it went with one above it.
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", point, err)
		}
	}
	left, err := mountsBelow(p.dir)
	if err != nil {
		return err
	}
	if len(left) > 0 {
		return fmt.Errorf("unmount %s: it is still mounted", strings.Join(left, ", "))
	}
	return nil
}

// removeCgroups removes the node's cgroups in every hierarchy of either cgroup
// version: the tree below its parent, and those of its containers elsewhere,
// where a pod was made without the parent.
func (p paths) removeCgroups(ctx context.Context) error {
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	ids := p.containerIDs()
	for m := range parseMounts(mountinfo) {
		if m.kind != "cgroup" && m.kind != "cgroup2" {
			continue
		}
		var groups []string
		err := filepath.WalkDir(m.point, func(dir string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // gone meanwhile
			}
			if err != nil || !e.IsDir() {
				return err
			}
			rel := strings.TrimPrefix(dir, m.point)
			name := e.Name()
			name = name[strings.LastIndexByte(name, '-')+1:]
			if rel == p.cgroupParent() || strings.HasPrefix(rel, p.cgroupParent()+"/") || ids[name] {
				groups = append(groups, dir)
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("look for cgroups: %w", err)
		}
		slices.Reverse(groups) // children first
		for _, dir := range groups {
			if err := removeCgroup(ctx, dir); err != nil {
				return err
			}
		}
		// Containers of pods without a parent are in /crio, those of any CRI-O.
		// It goes when it is empty.
		_ = unix.Rmdir(filepath.Join(m.point, "crio"))
	}
	return nil
}

// containerIDs are the ids of all pods and containers that the node's storage
// knows or has left files of.
func (p paths) containerIDs() map[string]bool {
	ids := map[string]bool{}
	for _, root := range []string{p.crioRoot(), p.crioRunRoot()} {
		entries, _ := os.ReadDir(filepath.Join(root, "overlay-containers"))
		for _, e := range entries {
			if e.IsDir() {
				ids[e.Name()] = true
			}
		}
	}
	return ids
}

// removeCgroup waits for the last processes of a cgroup to be gone from it.
func removeCgroup(ctx context.Context, dir string) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Rmdir(dir)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		case <-tick.C:
		}
	}
}
