package realnode

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/proxy"
	"github.com/ocihold/ocihold/test/token"
)

// The programs of a node, as Kill and Start name them.
const (
	CRIO     = "crio"
	Ocihold  = "ocihold"
	Registry = "registry"
	Proxy    = "proxy"
)

// startLimit bounds the wait for one program to answer.
const startLimit = 60 * time.Second

// Options say what node to boot.
type Options struct {
	// Dir is the node's directory; it is made if absent. What an earlier node
	// left there (images, containers) is taken over.
	Dir string
	// OciholdConf is a file of settings for ocihold, applied over the node's.
	OciholdConf string
	// CRIOConf are drop-ins for CRI-O, applied over the node's in this order.
	CRIOConf []string
	// TLS makes the registry speak HTTPS with a certificate of its own.
	TLS bool
	// Auth is user:password, asked for by the registry; "" for none. CRI-O gets
	// it by its global_auth_file.
	Auth string
	// Tokens makes the registry ask for tokens instead of the password, and a
	// token service give them for it.
	Tokens bool
	// HandlerRoots gives the handlers vm and wasm roots of their own. Pods may
	// choose vm by annotation; wasm is for the platform wasi/wasm.
	HandlerRoots bool
	// Guest and GVisor add the handlers of these names.
	Guest, GVisor bool
	// WithoutOcihold leaves ocihold out, for comparison with a plain CRI-O.
	WithoutOcihold bool
	// Log hears what takes long. May be nil.
	Log logrus.FieldLogger
}

// state is what a later process needs to know of a node.
type state struct {
	ProxyAddress   string `json:"proxy_address"`
	TLS            bool   `json:"tls"`
	Auth           string `json:"auth,omitempty"`
	Tokens         bool   `json:"tokens,omitempty"`
	WithoutOcihold bool   `json:"without_ocihold"`
}

// Node is a booted node. It is safe for concurrent use, except for Down.
type Node struct {
	paths paths
	state state
	conn  *grpc.ClientConn
	// images is the connection to ocihold's ImageService.
	images *grpc.ClientConn
	under  map[string][]string
}

// Up boots a node and returns when everything answers. When it fails, what was
// started is brought down again, and the error ends with the log of the program
// at fault. The environment variable CRIO names another CRI-O to run.
func Up(ctx context.Context, o Options) (*Node, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("boot a node: root is needed")
	}
	p, err := newPaths(o.Dir)
	if err != nil {
		return nil, err
	}
	n := &Node{paths: p, state: state{TLS: o.TLS, Auth: o.Auth, Tokens: o.Tokens, WithoutOcihold: o.WithoutOcihold}}
	for _, name := range []string{CRIO, Ocihold, Registry, Proxy} {
		fd, err := n.running(name)
		if err != nil {
			return nil, err
		}
		if fd >= 0 {
			_ = syscall.Close(fd)
			return nil, fmt.Errorf("boot a node in %s: its %s is running already, bring it down first", p.dir, name)
		}
	}
	if err := n.boot(ctx, o); err != nil {
		n.Close()
		// ctx may be what failed it.
		return nil, errors.Join(err, Down(context.WithoutCancel(ctx), p.dir))
	}
	return n, nil
}

func (n *Node) boot(ctx context.Context, o Options) error {
	for _, d := range n.paths.dirs() {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if err := n.installPrograms(ctx, o); err != nil {
		return err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listen for clients of the registry: %w", err)
	}
	n.state.ProxyAddress = listener.Addr().String()
	if err := errors.Join(n.writeConfig(o), n.save()); err != nil {
		_ = listener.Close()
		return err
	}
	if err := n.startProxy(ctx, listener); err != nil {
		return err
	}
	if err := n.Start(ctx, Registry); err != nil {
		return err
	}
	if err := n.pushBaseImages(ctx); err != nil {
		return err
	}
	if !n.state.WithoutOcihold {
		if err := n.renderForCRIO(ctx); err != nil {
			return err
		}
	}
	if err := n.Start(ctx, CRIO); err != nil {
		return err
	}
	if !n.state.WithoutOcihold {
		if err := n.Start(ctx, Ocihold); err != nil {
			return err
		}
	}
	for _, image := range []string{n.pauseImage(), n.BaseImage()} {
		if _, err := n.Pull(ctx, image); err != nil {
			return err
		}
	}
	return n.Proxy().ResetCounts(ctx)
}

// Attach returns the node in a directory, booted by any process.
func Attach(dir string) (*Node, error) {
	p, err := newPaths(dir)
	if err != nil {
		return nil, err
	}
	n := &Node{paths: p}
	content, err := os.ReadFile(p.state())
	if err != nil {
		return nil, fmt.Errorf("attach to the node in %s: %w", p.dir, err)
	}
	if err := json.Unmarshal(content, &n.state); err != nil {
		return nil, fmt.Errorf("attach to the node in %s: %w", p.dir, err)
	}
	return n, n.dial()
}

// Close ends the connections to the node, which goes on running.
func (n *Node) Close() {
	for _, conn := range []**grpc.ClientConn{&n.conn, &n.images} {
		if *conn != nil {
			_ = (*conn).Close()
			*conn = nil
		}
	}
}

// Down closes n and brings its node down; see the function Down.
func (n *Node) Down(ctx context.Context) error {
	n.Close()
	return Down(ctx, n.paths.dir)
}

// Kill sends a signal to one program of the node. When the signal ends
// programs, it returns once that one has ended. A program that does not run is
// left alone.
func (n *Node) Kill(ctx context.Context, name string, sig syscall.Signal) error {
	if err := checkName(name); err != nil {
		return err
	}
	return n.signal(ctx, name, sig)
}

// Start starts one program of the node that was killed, and returns when it
// answers.
func (n *Node) Start(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	fd, err := n.running(name)
	if err != nil {
		return err
	}
	if fd >= 0 {
		_ = syscall.Close(fd)
		return fmt.Errorf("start %s: it is running", name)
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	switch name {
	case Proxy:
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", n.state.ProxyAddress)
		if err != nil {
			return fmt.Errorf("listen for clients of the registry: %w", err)
		}
		return n.startProxy(ctx, listener)
	case Registry:
		return n.startRegistry(ctx)
	case CRIO:
		return n.startCRIO(ctx)
	default:
		return n.startOcihold(ctx)
	}
}

func checkName(name string) error {
	names := []string{CRIO, Ocihold, Registry, Proxy}
	if !slices.Contains(names, name) {
		return fmt.Errorf("a node has no program %q: it has %s", name, strings.Join(names, ", "))
	}
	return nil
}

// startProxy hands the listener over to the proxy and closes it here.
func (n *Node) startProxy(ctx context.Context, listener net.Listener) error {
	defer func() { _ = listener.Close() }()
	file, err := listener.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	cmd := exec.Command(n.paths.bin("registry-proxy"),
		"-registry", n.paths.registrySocket(), "-control", n.paths.proxySocket())
	if n.state.TLS {
		cmd.Args = append(cmd.Args, "-cert", n.paths.cert(), "-key", n.paths.key())
	}
	if n.state.Tokens {
		cmd.Args = append(cmd.Args, "-token-users", n.paths.users(), "-token-cert", n.paths.cert(), "-token-key", n.paths.key())
	}
	cmd.ExtraFiles = []*os.File{file}
	if err := n.spawn(Proxy, cmd); err != nil {
		return err
	}
	return n.poll(ctx, Proxy, func(ctx context.Context) error {
		_, err := n.Proxy().Counts(ctx)
		return err
	})
}

func (n *Node) startRegistry(ctx context.Context) error {
	if err := n.spawn(Registry, exec.Command(n.paths.bin("registry"), "serve", n.paths.registryConf())); err != nil {
		return err
	}
	client := http.Client{Transport: n.RegistryTransport()}
	return n.poll(ctx, Registry, func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://registry/v2/", nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		return resp.Body.Close()
	})
}

func (n *Node) startCRIO(ctx context.Context) error {
	p := n.paths
	err := n.spawn(CRIO, exec.Command(p.bin("crio"), "-c", p.crioConf(), "-d", p.crioDropIns()))
	if err != nil {
		return err
	}
	if n.conn == nil {
		if err := n.dial(); err != nil {
			return err
		}
	}
	return n.poll(ctx, CRIO, n.crioReady)
}

func (n *Node) startOcihold(ctx context.Context) error {
	if n.state.WithoutOcihold {
		return errors.New("start ocihold: the node was booted without it")
	}
	p := n.paths
	if err := n.spawn(Ocihold, exec.Command(p.bin("ocihold"), "--config", p.ociholdConf(), "run")); err != nil {
		return err
	}
	return n.poll(ctx, Ocihold, func(ctx context.Context) error {
		_, err := n.ocihold(ctx, "status")
		return err
	})
}

// renderForCRIO has ocihold install its drop-in, with the directories that
// CRI-O needs for it, and its hook.
func (n *Node) renderForCRIO(ctx context.Context) error {
	for _, part := range []string{"crio", "hook"} {
		if _, err := n.ocihold(ctx, "config", part, "--write"); err != nil {
			return err
		}
	}
	return nil
}

// ocihold runs one of its commands and returns what it prints.
func (n *Node) ocihold(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, n.paths.bin("ocihold"), append([]string{"--config", n.paths.ociholdConf()}, args...)...)
	cmd.Env = n.DaemonEnv()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("run ocihold %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}

func (n *Node) installPrograms(ctx context.Context, o Options) error {
	b, err := newBuilder(func(message string) {
		if o.Log != nil {
			o.Log.Info(message)
		}
	})
	if err != nil {
		return err
	}
	for _, t := range []tool{crioTool, crictlTool, registryTool} {
		program := os.Getenv("CRIO")
		if t != crioTool || program == "" {
			if program, err = b.tool(ctx, t); err != nil {
				return err
			}
		}
		if err := installTool(program, n.paths.bin(t.name)); err != nil {
			return err
		}
	}
	built, err := b.workTree(ctx, !o.WithoutOcihold)
	if err != nil {
		return err
	}
	names := []string{"pinns", "pause", Guest, "registry-proxy"}
	if !o.WithoutOcihold {
		names = append(names, "ocihold", "ocihold-guard")
	}
	for _, name := range names {
		if err := install(filepath.Join(built, name), n.paths.bin(name)); err != nil {
			return err
		}
	}
	runc, err := findRunc()
	if err != nil {
		return err
	}
	if err := installTool(runc, n.paths.bin(Guest+".real")); err != nil || !o.GVisor {
		return err
	}
	runsc, err := b.tool(ctx, runscTool)
	if err != nil {
		return err
	}
	return errors.Join(install(filepath.Join(built, Guest), n.paths.bin(GVisor)), installTool(runsc, n.paths.bin(GVisor+".real")))
}

// pushBaseImages puts the pause image and the base image into the registry.
func (n *Node) pushBaseImages(ctx context.Context) error {
	pause, err := images.Pause(n.paths.bin("pause"))
	if err != nil {
		return err
	}
	base, err := images.Busybox()
	if err != nil {
		return err
	}
	return errors.Join(n.Push(ctx, "pause:1", pause), n.Push(ctx, "base:1", base))
}

func (n *Node) save() error {
	content, err := json.MarshalIndent(n.state, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(n.paths.env(), []byte(n.envFile()), 0o644); err != nil {
		return err
	}
	return os.WriteFile(n.paths.state(), content, 0o600)
}

// Dir is the node's directory, with symbolic links resolved.
func (n *Node) Dir() string { return n.paths.dir }

// Registry is the registry's address as clients must use it: HOST:PORT of the
// proxy.
func (n *Node) Registry() string { return n.state.ProxyAddress }

// Ref is the full name of an image in the node's registry: Ref("base:1").
func (n *Node) Ref(image string) string { return n.Registry() + "/" + image }

// BaseImage is an image with busybox, present on every node.
func (n *Node) BaseImage() string { return n.Ref("base:1") }

func (n *Node) pauseImage() string { return n.Ref("pause:1") }

// CRIORoot is the root of CRI-O's storage.
func (n *Node) CRIORoot() string { return n.paths.crioRoot() }

// HandlerRoot is the root of a handler that has one of its own, "vm" or "wasm".
func (n *Node) HandlerRoot(handler string) string { return n.paths.handlerRoot(handler) }

// CRIORunRoot is the run root of CRI-O's storage.
func (n *Node) CRIORunRoot() string { return n.paths.crioRunRoot() }

// RunDir is ocihold's run_dir.
func (n *Node) RunDir() string { return n.paths.ociholdRunDir() }

// OciholdConf is ocihold's configuration file.
func (n *Node) OciholdConf() string { return n.paths.ociholdConf() }

// AuthFile is CRI-O's global_auth_file, which a test may change.
func (n *Node) AuthFile() string { return n.paths.authFile() }

// LogFile is the log of one program of the node.
func (n *Node) LogFile(name string) string { return n.paths.log(name) }

// Proxy is the control of the proxy before the registry.
func (n *Node) Proxy() *proxy.Client { return proxy.NewClient(n.paths.proxySocket()) }

// RegistryTransport leads past the proxy straight to the registry, whatever
// address is asked for.
func (n *Node) RegistryTransport() http.RoundTripper {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", n.paths.registrySocket())
		},
		DisableKeepAlives: true,
	}
}

// Push puts an image, an index or an artifact made by package images into the
// registry, past the proxy. ref is without the registry: "models/small:1".
func (n *Node) Push(ctx context.Context, ref string, content images.Pushable) error {
	auth, err := n.pushAuth(ref)
	if err != nil {
		return err
	}
	return images.Push(ctx, n.Ref(ref), content, n.RegistryTransport(), auth)
}

func (n *Node) pushAuth(ref string) (authn.Authenticator, error) {
	user, password, ok := strings.Cut(n.state.Auth, ":")
	switch {
	case !ok:
		return authn.Anonymous, nil
	case !n.state.Tokens:
		return &authn.Basic{Username: user, Password: password}, nil
	}
	named, err := name.ParseReference(n.Ref(ref))
	if err != nil {
		return nil, err
	}
	signed, err := n.Token(named.Context().RepositoryStr())
	return &authn.Bearer{Token: signed}, err
}

// Token is a token for a repository, as the registry's token service gives it
// to the node's user.
func (n *Node) Token(repository string) (string, error) {
	issuer, err := token.NewIssuer(n.paths.cert(), n.paths.key())
	if err != nil {
		return "", err
	}
	user, _, _ := strings.Cut(n.state.Auth, ":")
	return issuer.Sign(user, repository)
}
