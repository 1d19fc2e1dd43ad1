// Command pinns pins fresh namespaces of a pod for CRI-O, in place of CRI-O's
// program of that name, which is not a Go package.
//
// It takes the flags that CRI-O passes: -d DIR, -f NAME, -s KEY=VALUE (sysctls,
// repeated), --uts, --ipc, --net and --user (each may be "=host": pin the
// caller's own), --uid-mapping and --gid-mapping ("CONTAINER-HOST-SIZE@"
// repeated). Each namespace is bound at DIR/<type>ns/NAME.
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// holdArg makes the program the process that holds the new namespaces.
const holdArg = "hold-namespaces"

var cloneFlags = map[string]uintptr{
	"user": unix.CLONE_NEWUSER,
	"uts":  unix.CLONE_NEWUTS,
	"ipc":  unix.CLONE_NEWIPC,
	"net":  unix.CLONE_NEWNET,
}

type request struct {
	dir, name  string
	kinds      []string
	flags      uintptr
	uids, gids []syscall.SysProcIDMap
	sysctls    []string
}

func main() {
	run := func() error { return pin(os.Args[1:]) }
	if len(os.Args) > 1 && os.Args[1] == holdArg {
		run = func() error { return hold(os.Args[2:]) }
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "pinns:", err)
		os.Exit(1)
	}
}

func pin(args []string) error {
	req, err := parse(args)
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", append([]string{holdArg}, req.sysctls...)...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: req.flags, Pdeathsig: syscall.SIGKILL}
	if req.flags&unix.CLONE_NEWUSER != 0 {
		cmd.SysProcAttr.UidMappings = req.uids
		cmd.SysProcAttr.GidMappings = req.gids
		cmd.SysProcAttr.GidMappingsEnableSetgroups = true
		cmd.SysProcAttr.Credential = &syscall.Credential{}
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("create namespaces: %w", err)
	}
	_, ready := bufio.NewReader(stdout).ReadString('\n')
	if ready == nil {
		ready = bind(req, cmd.Process.Pid)
	}
	_ = stdin.Close()
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("hold namespaces: %w", err)
	}
	return ready
}

func bind(req request, pid int) error {
	for _, kind := range req.kinds {
		dir := filepath.Join(req.dir, kind+"ns")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		pin := filepath.Join(dir, req.name)
		f, err := os.OpenFile(pin, os.O_RDONLY|os.O_CREATE, 0)
		if err != nil {
			return err
		}
		_ = f.Close()
		source := fmt.Sprintf("/proc/%d/ns/%s", pid, kind)
		if err := unix.Mount(source, pin, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s at %s: %w", source, pin, err)
		}
	}
	return nil
}

// hold runs inside the new namespaces: it sets the sysctls, says so, and stays
// until its standard input ends.
func hold(sysctls []string) error {
	for _, s := range sysctls {
		key, value, ok := strings.Cut(s, "=")
		if !ok || key == "" || value == "" {
			return fmt.Errorf("sysctl %q is not KEY=VALUE", s)
		}
		file := filepath.Join("/proc/sys", strings.ReplaceAll(key, ".", "/"))
		if err := os.WriteFile(file, []byte(value), 0o644); err != nil {
			return fmt.Errorf("set sysctl %s: %w", key, err)
		}
	}
	fmt.Println("ready")
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

func parse(args []string) (request, error) {
	var req request
	for i := 0; i < len(args); i++ {
		key, value, hasValue := strings.Cut(args[i], "=")
		switch key {
		case "-d", "-f", "-s":
			i++
			if i == len(args) {
				return req, fmt.Errorf("%s needs a value", key)
			}
			value = args[i]
			switch key {
			case "-d":
				req.dir = value
			case "-f":
				req.name = value
			case "-s":
				req.sysctls = append(req.sysctls, value)
			}
		case "--uid-mapping", "--gid-mapping":
			maps, err := mappings(value)
			if err != nil {
				return req, fmt.Errorf("%s: %w", key, err)
			}
			if key == "--uid-mapping" {
				req.uids = maps
			} else {
				req.gids = maps
			}
		default:
			kind := strings.TrimPrefix(key, "--")
			flag, known := cloneFlags[kind]
			if !known || (hasValue && value != "host") {
				return req, fmt.Errorf("unknown argument %q", args[i])
			}
			req.kinds = append(req.kinds, kind)
			if !hasValue {
				req.flags |= flag
			}
		}
	}
	if req.dir == "" || req.name == "" || len(req.kinds) == 0 {
		return req, fmt.Errorf("-d, -f and at least one namespace are needed")
	}
	if req.flags&unix.CLONE_NEWUSER != 0 && (req.uids == nil || req.gids == nil) {
		return req, fmt.Errorf("--user needs --uid-mapping and --gid-mapping")
	}
	return req, nil
}

func mappings(s string) ([]syscall.SysProcIDMap, error) {
	var maps []syscall.SysProcIDMap
	for part := range strings.SplitSeq(strings.Trim(s, "@"), "@") {
		fields := strings.Split(part, "-")
		if len(fields) != 3 {
			return nil, fmt.Errorf("%q is not CONTAINER-HOST-SIZE", part)
		}
		var n [3]int
		for i, f := range fields {
			v, err := strconv.Atoi(f)
			if err != nil {
				return nil, err
			}
			n[i] = v
		}
		maps = append(maps, syscall.SysProcIDMap{ContainerID: n[0], HostID: n[1], Size: n[2]})
	}
	return maps, nil
}
