package realnode

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	productTags = "containers_image_openpgp exclude_graphdriver_btrfs exclude_graphdriver_devicemapper"
	crioTags    = productTags + " containers_image_ostree_stub seccomp libsubid_stub"
)

// tool is a program built from a nested module that pins its version.
type tool struct {
	name, module, pkg, tags string
	cgo                     bool
}

var (
	crioTool     = tool{"crio", "crio", "github.com/cri-o/cri-o/cmd/crio", crioTags, true}
	crictlTool   = tool{"crictl", "crictl", "sigs.k8s.io/cri-tools/cmd/crictl", "", false}
	registryTool = tool{"registry", "registry", "github.com/distribution/distribution/v3/cmd/registry", "", false}
	oracleTool   = tool{"oracle", "crio", "./oracle", crioTags, true}
	runscTool    = tool{"runsc", "runsc", "gvisor.dev/gvisor/runsc", "", false}
	kubeletTool  = tool{"kubelet", "kubelet", "k8s.io/kubernetes/cmd/kubelet", "", false}
)

// builder builds programs and keeps them in the cache directory.
type builder struct {
	cache  string
	source string // the folder of the test module
	log    func(string)
	race   bool
}

// raced tells whether nodes run an ocihold that looks for data races.
func raced() bool { return os.Getenv("OCIHOLD_RACE") != "" }

func newBuilder(log func(string)) (builder, error) {
	_, file, _, _ := runtime.Caller(0)
	source := filepath.Dir(filepath.Dir(file))
	if _, err := os.Stat(filepath.Join(source, "go.mod")); err != nil {
		return builder{}, fmt.Errorf("find the source of the test module (built with -trimpath?): %w", err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return builder{}, fmt.Errorf("find the cache directory: %w", err)
	}
	return builder{cache: filepath.Join(cache, "ocihold-test"), source: source, log: log}, nil
}

// OracleBinary builds the program that prints CRI-O's own reading of its
// configuration, if it is not in the cache, and returns its path.
func OracleBinary(ctx context.Context) (string, error) {
	return toolBinary(ctx, oracleTool)
}

// KubeletBinary does so for kubelet, whose build takes minutes.
func KubeletBinary(ctx context.Context) (string, error) {
	return toolBinary(ctx, kubeletTool)
}

func toolBinary(ctx context.Context, t tool) (string, error) {
	b, err := newBuilder(func(string) {})
	if err != nil {
		return "", err
	}
	return b.tool(ctx, t)
}

// tool returns the cached program, built first if need be. Its name in the
// cache is made of what decides its content: the module's files, the build tags
// and the version of Go; for a package of the module itself, its source too.
func (b builder) tool(ctx context.Context, t tool) (string, error) {
	dir := filepath.Join(b.source, t.module)
	sum := sha256.New()
	_, _ = fmt.Fprintln(sum, t.tags, runtime.Version())
	files := []string{"go.mod", "go.sum"}
	if strings.HasPrefix(t.pkg, "./") {
		files = append(files, filepath.Join(t.pkg, "main.go"))
	}
	for _, f := range files {
		content, err := os.ReadFile(filepath.Join(dir, f))
		if err != nil {
			return "", err
		}
		_, _ = sum.Write(content)
	}
	home := filepath.Join(b.cache, t.name+"-"+hex.EncodeToString(sum.Sum(nil)[:6]))
	program := filepath.Join(home, t.name)
	unlock, err := lockDir(home)
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	b.log("building " + t.name + ", once for this version")
	if err := b.build(ctx, dir, program+".new", t.tags, t.cgo, t.pkg); err != nil {
		return "", err
	}
	return program, os.Rename(program+".new", program)
}

// workTree builds the programs of this checkout into the cache and returns
// their folder. Go itself knows what is up to date.
func (b builder) workTree(ctx context.Context, withOcihold bool) (string, error) {
	sum := sha256.Sum256([]byte(b.source))
	home := filepath.Join(b.cache, "checkout-"+hex.EncodeToString(sum[:6]))
	unlock, err := lockDir(home)
	if err != nil {
		return "", err
	}
	defer unlock()
	out := home + string(filepath.Separator)
	if err := b.build(ctx, b.source, out, "", false, "./pinns", "./pause", "./guest", "./proxy/cmd/registry-proxy"); err != nil {
		return "", err
	}
	if withOcihold {
		build := b
		build.race = raced()
		err := errors.Join(
			build.build(ctx, filepath.Dir(b.source), out, productTags, raced(), "./nriplugin/cmd/ocihold"),
			b.build(ctx, filepath.Dir(b.source), out, productTags, false, "./nriplugin/cmd/ocihold-guard"))
		if err != nil {
			return "", err
		}
	}
	return home, nil
}

func (b builder) build(ctx context.Context, dir, out, tags string, cgo bool, pkgs ...string) error {
	args := []string{"build", "-buildvcs=false", "-tags", tags, "-o", out}
	if b.race {
		args = append(args, "-race")
	}
	args = append(args, pkgs...)
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOWORK=off", "CGO_ENABLED=0")
	if cgo {
		cmd.Env = append(cmd.Env, "CGO_ENABLED=1")
	}
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", strings.Join(pkgs, " "), err, bytes.TrimSpace(output))
	}
	return nil
}

// lockDir makes the directory and locks it against other processes.
func lockDir(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			_ = f.Close()
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
		return func() { _ = f.Close() }, nil
	}
}

// install puts a program into the node's own bin folder, as a copy: a build for
// another node must not change it.
func install(from, to string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = src.Close() }()
	if err := os.Remove(to); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(dst, src); err != nil {
		_ = dst.Close()
		return err
	}
	return dst.Close()
}

// installTool puts a link to a cached program into the node's bin folder.
func installTool(from, to string) error {
	if err := os.Remove(to); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.Symlink(from, to)
}
