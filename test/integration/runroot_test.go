package integration

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/realnode"
)

// A run root that is changed in the configuration while the root is in use is
// refused, at start and by check, until it is changed back or nothing uses the
// root.
func TestChangedRunRoot(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	a := pushApp(t, n, "app:1", appLayer("a", busybox(t)...))
	id := pullFor(t, n, "vm", a.ref)
	pod, err := n.RunPod(t.Context(), realnode.PodSpec{Handler: "vm"})
	require.NoError(t, err)
	c := run(t, pod, realnode.ContainerSpec{Image: id, UserImage: a.ref})
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	change := filepath.Join(n.OciholdConf()+".d", "99-changed.toml")
	moved := filepath.Join(n.Dir(), "run", "moved")
	require.NoError(t, os.WriteFile(change, []byte("[handlers.vm]\nrunroot = \""+moved+"\"\n"), 0o600))

	refused := func(command ...string) {
		t.Helper()
		out, err := ociholdCommand(t, n, command...)
		require.Error(t, err)
		require.Contains(t, out, "root is in use with another run root")
		require.Contains(t, out, `for handler "vm" again, or end these first: container k8s_main_`+pod.Config.GetMetadata().GetName())
	}
	refused("run")
	refused("check")
	require.NoDirExists(t, moved)
	require.NoError(t, os.Rename(change, change+".away"))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	a.requireRead(t, c)
	require.NoError(t, pod.Remove(t.Context()))

	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	require.NoError(t, os.Rename(change+".away", change))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	require.DirExists(t, moved)
	require.NoError(t, removeFrom(t, n, "vm", id))
	n.AssertClean(t)
}
