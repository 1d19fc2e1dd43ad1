package realnode

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestCheckCleanSeesWhatIsLeft(t *testing.T) {
	dir, err := os.MkdirTemp("", "node")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	p, err := newPaths(dir)
	require.NoError(t, err)
	n := &Node{paths: p}
	require.NoError(t, n.checkClean(), "nothing there at all")

	volume := filepath.Join(n.RunDir(), "mounts", "key")
	require.NoError(t, os.MkdirAll(volume, 0o755))
	require.NoError(t, unix.Mount("none", volume, "tmpfs", 0, ""))
	require.ErrorContains(t, n.checkClean(), "volume mount left: "+volume)
	require.NoError(t, p.unmountAll())
	require.NoError(t, n.checkClean())

	records := filepath.Join(n.CRIORoot(), "overlay-containers", "containers.json")
	require.NoError(t, os.MkdirAll(filepath.Dir(records), 0o755))
	require.NoError(t, os.WriteFile(records, []byte(`[{"names": ["ocihold-lease-abc"]}, {"names": ["k8s_a"]}]`), 0o600))
	require.EqualError(t, n.checkClean(), "lease left: abc")
	require.NoError(t, os.Remove(records))

	process := exec.Command("sleep", "1000")
	process.Env = []string{nodeEnv(p)}
	require.NoError(t, process.Start())
	require.ErrorContains(t, n.checkClean(), "process left: ")
	require.NoError(t, p.endProcesses(t.Context()))
	require.Error(t, process.Wait())
	require.NoError(t, n.checkClean())
}
