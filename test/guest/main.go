// Command guest stands between CRI-O and an OCI runtime. NAME being its own name,
// it hands over to NAME.real beside it. As "guest", to runc, it does as runtimes do
// that run containers in a virtual machine: it takes nothing of the host into the
// guest but by bind mounts, and runs the createRuntime hooks itself, with the id of
// a process that has no mount of the container; runc is not to run these. As
// "gvisor", to runsc, it makes up for what CRI-O and a machine without KVM want
// otherwise.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// guestMounts are the types of what a guest mounts for itself, and bind.
var guestMounts = []string{"bind", "cgroup", "devpts", "mqueue", "proc", "sysfs", "tmpfs"}

func main() {
	name := filepath.Base(os.Args[0])
	if err := run(name, os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
}

func run(name string, args []string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	command := []string{filepath.Join(filepath.Dir(self), name+".real")}
	prepare := guest
	if name == "gvisor" {
		command = append(command, "--platform=systrap", "--network=host", "--ignore-cgroups", "--overlay2=none")
		prepare = gvisor
	}
	command = append(command, args...)
	switch {
	case slices.Contains(args, "create"):
		if err := rewrite(args, prepare); err != nil {
			return err
		}
	case slices.Contains(args, "start") && name == "gvisor":
		return start(command)
	}
	return syscall.Exec(command[0], command, os.Environ())
}

// start has runsc start a container. Processes that it leaves behind keep its output
// open, to whose end CRI-O would wait: so that is a file.
func start(command []string) error {
	out, err := os.CreateTemp("", "start")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name()) //nolint:errcheck // nothing depends on it
	cmd := exec.Cmd{Path: command[0], Args: command, Stdout: out, Stderr: out}
	if err := cmd.Run(); err != nil {
		text, _ := os.ReadFile(out.Name())
		return fmt.Errorf("%w: %s", err, text)
	}
	return nil
}

// container is the one that is to be created.
type container struct {
	id, bundle string
	spec       specs.Spec
}

// rewrite has the bundle's config.json prepared.
func rewrite(args []string, prepare func(*container) error) error {
	c := container{id: args[len(args)-1]}
	at := slices.Index(args, "--bundle")
	if at < 0 || at+1 == len(args) {
		return errors.New("create without --bundle")
	}
	c.bundle = args[at+1]
	file := filepath.Join(c.bundle, "config.json")
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, &c.spec); err != nil {
		return fmt.Errorf("parse %s: %w", file, err)
	}
	if err := prepare(&c); err != nil {
		return err
	}
	if text, err = json.Marshal(c.spec); err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o600)
}

func guest(c *container) error {
	for _, m := range c.spec.Mounts {
		if !slices.Contains(guestMounts, m.Type) {
			return fmt.Errorf("mount of type %q at %s: a guest has only bind mounts of the host", m.Type, m.Destination)
		}
	}
	if c.spec.Hooks == nil {
		return nil
	}
	state, err := json.Marshal(specs.State{
		Version: c.spec.Version, ID: c.id, Status: specs.StateCreating, Pid: os.Getpid(), Bundle: c.bundle, Annotations: c.spec.Annotations,
	})
	if err != nil {
		return err
	}
	for _, h := range c.spec.Hooks.CreateRuntime {
		hook := exec.Cmd{Path: h.Path, Args: h.Args, Env: h.Env, Stdin: bytes.NewReader(state)}
		if out, err := hook.CombinedOutput(); err != nil {
			return fmt.Errorf("run hook %s: %w: %s", h.Path, err, bytes.TrimSpace(out))
		}
	}
	c.spec.Hooks.CreateRuntime = nil
	return nil
}

// gvisor takes away an OOM score that this machine does not let one set.
func gvisor(c *container) error {
	const file = "/proc/self/oom_score_adj"
	before, err := os.ReadFile(file)
	if score := c.spec.Process.OOMScoreAdj; err == nil && score != nil {
		if os.WriteFile(file, []byte(strconv.Itoa(*score)), 0) != nil {
			c.spec.Process.OOMScoreAdj = nil
		}
		err = os.WriteFile(file, before, 0)
	}
	return err
}
