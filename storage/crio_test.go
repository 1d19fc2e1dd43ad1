package storage

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/signature"
	istorage "go.podman.io/image/v5/storage"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/reexec"
)

// crioCommand, run in a process of its own, does to a root what CRI-O does, with the handler roots as additional image
// stores: GRAPHROOT RUNROOT STORE,STORE… OPERATION ARGUMENTS….
const crioCommand = "storage-test-crio"

func registerCRIO() {
	reexec.Register(crioCommand, func() {
		if err := crioMain(os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	})
}

func crioMain(graphRoot, runRoot, stores, operation string, args []string) error {
	options := []string{"overlay.skip_mount_home=true"}
	for store := range strings.SplitSeq(stores, ",") {
		options = append(options, "overlay.imagestore="+store)
	}
	store, err := cstorage.GetStore(cstorage.StoreOptions{
		GraphRoot: graphRoot, RunRoot: runRoot, GraphDriverName: "overlay", GraphDriverOptions: options,
	})
	if err != nil {
		return err
	}
	if operation == "await" { // OPERATION ARGUMENTS…: when it is told to, as a CRI-O that has run for a while
		if _, err := store.Layers(); err != nil {
			return err
		}
		fmt.Println("ready")
		if _, err := io.ReadAll(os.Stdin); err != nil {
			return err
		}
		operation, args = args[0], args[1:]
	}
	switch operation {
	case "pull":
		return crioPull(store, args[0])
	case "create": // IMAGE CONTAINER
		_, err = store.CreateContainer(args[1], []string{"k8s_" + args[1]}, args[0], "", "{}", nil)
		return err
	case "delete":
		return store.DeleteContainer(args[0])
	case "rmi":
		_, err := store.DeleteImage(args[0], true)
		return err
	case "check":
		return crioCheck(store)
	}
	return errors.New("what is " + operation)
}

func crioPull(store cstorage.Store, ref string) error {
	named, err := reference.ParseNormalizedNamed(ref)
	if err != nil {
		return err
	}
	source, err := docker.NewReference(named)
	if err != nil {
		return err
	}
	destination, err := istorage.Transport.NewStoreReference(store, named, "")
	if err != nil {
		return err
	}
	policy, err := signature.NewPolicyContext(&signature.Policy{Default: signature.PolicyRequirements{signature.NewPRInsecureAcceptAnything()}})
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "crio")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	sys := &types.SystemContext{
		DockerInsecureSkipTLSVerify: types.OptionalBoolTrue, BigFilesTemporaryDir: dir, BlobInfoCacheDir: dir,
		SystemRegistriesConfPath: os.DevNull, SystemRegistriesConfDirPath: dir,
	}
	_, err = copy.Image(context.Background(), policy, destination, source, &copy.Options{SourceCtx: sys, DestinationCtx: sys})
	return err
}

// crioCheck makes a container of every image and reads its files, and those of the containers that are there; then it
// looks whether CRI-O's image list would be whole.
func crioCheck(store cstorage.Store) error {
	images, err := store.Images()
	if err != nil {
		return err
	}
	for _, image := range images {
		if _, err := store.ImageSize(image.ID); err != nil {
			return fmt.Errorf("list image %s %q: %w", image.ID, image.Names, err)
		}
		container, err := store.CreateContainer("", nil, image.ID, "", "{}", nil)
		if err != nil {
			return fmt.Errorf("create a container of image %s %q: %w", image.ID, image.Names, err)
		}
		if err := crioRead(store, container, image.ID); err != nil {
			return fmt.Errorf("container of image %s %q: %w", image.ID, image.Names, err)
		}
		if err := store.DeleteContainer(container.ID); err != nil {
			return err
		}
	}
	containers, err := store.Containers()
	if err != nil {
		return err
	}
	for _, container := range containers {
		if strings.HasPrefix(container.Names[0], recordNamePrefix) {
			continue
		}
		if err := crioRead(store, &container, container.ImageID); err != nil {
			return fmt.Errorf("container %q: %w", container.Names, err)
		}
	}
	return nil
}

// crioRead checks that a container has the file of each layer of its image.
func crioRead(store cstorage.Store, container *cstorage.Container, imageID string) error {
	dir, err := store.Mount(container.ID, "")
	if err != nil {
		return err
	}
	config, err := store.ImageBigData(imageID, "sha256:"+imageID)
	if err != nil {
		return err
	}
	var parsed struct {
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		} `json:"rootfs"`
	}
	if err := json.Unmarshal(config, &parsed); err != nil {
		return err
	}
	for i := range parsed.RootFS.DiffIDs {
		content, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("file-%d", i)))
		if errors.Is(err, fs.ErrNotExist) || len(content) == 0 {
			return fmt.Errorf("file-%d of %d is missing: %w", i, len(parsed.RootFS.DiffIDs), err)
		}
		if err != nil {
			return err
		}
	}
	_, err = store.Unmount(container.ID, true)
	return err
}

// testNode is CRI-O's root and handler roots.
type testNode struct {
	base     Options
	handlers []Options
	roots    *Roots
}

func newNode(tb testing.TB, names ...string) *testNode {
	tb.Helper()
	node := &testNode{base: testOptions(tb)}
	for _, name := range names {
		opt := testOptions(tb)
		opt.Name, opt.Marker = name, true
		require.NoError(tb, PrepareRoot(opt))
		node.handlers = append(node.handlers, opt)
	}
	node.roots = openRoots(tb, node.base, node.handlers)
	return node
}

func openRoots(tb testing.TB, base Options, handlers []Options) *Roots {
	tb.Helper()
	roots, err := OpenRoots(base, handlers)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, roots.Close()) })
	return roots
}

func (n *testNode) root(tb testing.TB, name string) *Root {
	tb.Helper()
	root, err := n.roots.Handler(name)
	require.NoError(tb, err)
	return root
}

func (n *testNode) pull(tb testing.TB, handler, ref string) Image {
	tb.Helper()
	image, err := n.root(tb, handler).Pull(tb.Context(), ref, PullOptions{})
	require.NoError(tb, err)
	return image
}

// crio does what CRI-O does.
func (n *testNode) crio(args ...string) error {
	out, err := n.crioProcess(args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("crio %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// runningCRIO returns a CRI-O that has opened its roots; call makes it do the operation.
func (n *testNode) runningCRIO(tb testing.TB, args ...string) (call func() error) {
	tb.Helper()
	cmd := n.crioProcess(append([]string{"await"}, args...)...)
	in, err := cmd.StdinPipe()
	require.NoError(tb, err)
	out, err := cmd.StdoutPipe()
	require.NoError(tb, err)
	require.NoError(tb, cmd.Start())
	ready, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(tb, err)
	require.Equal(tb, "ready\n", ready)
	return func() error { return errors.Join(in.Close(), cmd.Wait()) }
}

func (n *testNode) crioProcess(args ...string) *exec.Cmd {
	stores := make([]string, 0, len(n.handlers))
	for _, h := range n.handlers {
		stores = append(stores, h.GraphRoot)
	}
	return reexec.Command(append([]string{crioCommand, n.base.GraphRoot, n.base.RunRoot, strings.Join(stores, ",")}, args...)...)
}
