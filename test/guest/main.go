// Command guest stands between CRI-O and runc, as runtimes do that run containers
// in a virtual machine: it takes nothing of the host into the guest but by bind
// mounts, and runs the createRuntime hooks itself, with the id of a process that
// has no mount of the container. Then it hands over to NAME.real beside it, NAME
// being its own name, without those hooks.
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
	if slices.Contains(args, "create") {
		if err := rewrite(args); err != nil {
			return err
		}
	}
	real := filepath.Join(filepath.Dir(self), name+".real")
	return syscall.Exec(real, append([]string{real}, args...), os.Environ())
}

// container is the one that is to be created.
type container struct {
	id, bundle string
	spec       specs.Spec
}

// rewrite has the bundle's config.json prepared for a guest.
func rewrite(args []string) error {
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
	if err := guest(&c); err != nil {
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
