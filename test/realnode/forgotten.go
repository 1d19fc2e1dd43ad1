package realnode

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// EndForgotten kills what serves containers that CRI-O does not know any more, and
// returns the command lines: killed as it creates a container, CRI-O leaves the
// runtime's process, which waits to be started and has its mounts. Processes of pods
// and containers with the ids given are left alone.
func (n *Node) EndForgotten(ids ...string) ([]string, error) {
	pids, err := n.paths.processes()
	if err != nil {
		return nil, err
	}
	var ended []string
	for _, pid := range pids {
		proc := filepath.Join("/proc", strconv.Itoa(pid))
		command, _ := os.ReadFile(filepath.Join(proc, "cmdline"))
		if len(command) == 0 {
			continue // it is about to end
		}
		words := strings.ReplaceAll(string(command), "\x00", " ")
		cgroups, _ := os.ReadFile(filepath.Join(proc, "cgroup"))
		known := func(id string) bool { return strings.Contains(words+string(cgroups), id) }
		if program, _, _ := strings.Cut(words, " "); n.isProgram(program) || slices.ContainsFunc(ids, known) {
			continue
		}
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return ended, fmt.Errorf("kill process %d of a forgotten container: %w", pid, err)
		}
		ended = append(ended, words)
	}
	return ended, nil
}
