package integration

import (
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/signature"
	"go.podman.io/image/v5/types"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// nodeSystem says how a test speaks with the node's registry by
// containers/image; it has a registries.d of its own.
func nodeSystem(t testing.TB, n *realnode.Node) *types.SystemContext {
	t.Helper()
	return &types.SystemContext{
		DockerInsecureSkipTLSVerify: types.OptionalBoolTrue,
		AuthFilePath:                n.AuthFile(),
		SystemRegistriesConfPath:    filepath.Join(n.Dir(), "home", ".config", "containers", "registries.conf"),
		RegistriesDirPath:           registriesDir(n),
		BigFilesTemporaryDir:        t.TempDir(),
		BlobInfoCacheDir:            t.TempDir(),
	}
}

// registriesDir is the registries.d of the node.
func registriesDir(n *realnode.Node) string {
	return filepath.Join(n.Dir(), "home", ".config", "containers", "registries.d")
}

// recopy copies an image of the node's registry within it, as containers/image
// does by the options: signed, encrypted, compressed anew.
func recopy(t testing.TB, n *realnode.Node, from, to string, opt copy.Options) {
	t.Helper()
	policy, err := signature.NewPolicyContext(&signature.Policy{Default: signature.PolicyRequirements{signature.NewPRInsecureAcceptAnything()}})
	require.NoError(t, err)
	defer func() { require.NoError(t, policy.Destroy()) }()
	source, err := docker.ParseReference("//" + n.Ref(from))
	require.NoError(t, err)
	destination, err := docker.ParseReference("//" + n.Ref(to))
	require.NoError(t, err)
	opt.SourceCtx = nodeSystem(t, n)
	if opt.DestinationCtx == nil {
		opt.DestinationCtx = nodeSystem(t, n)
	}
	_, err = copy.Image(t.Context(), policy, destination, source, &opt)
	require.NoError(t, err)
}

// runnable pushes an image that can be run, with a file of its own.
func runnable(t testing.TB, n *realnode.Node, ref, content string) v1.Image {
	t.Helper()
	image, err := images.Image(images.Config{}, busybox(t), version(content))
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), ref, image))
	return image
}
