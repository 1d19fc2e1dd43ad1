package realnode

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// leasePrefix begins the names of the records by which ocihold holds images.
const leasePrefix = "ocihold-lease-"

// cleanLimit is how long ocihold may take to let go of what nobody uses.
const cleanLimit = time.Minute

// testingT is what AssertClean needs of a *testing.T.
type testingT interface {
	require.TestingT
	Helper()
}

// AssertClean fails the test unless, within some seconds, nothing is left of
// the pods that were removed: no mount of a volume, no lease in CRI-O's
// root, no process of a container.
func (n *Node) AssertClean(t testingT) {
	t.Helper()
	var last error
	assert.Eventually(t, func() bool { // and what follows says what is left
		last = n.checkClean()
		return last == nil
	}, cleanLimit, 100*time.Millisecond, "node is not clean")
	require.NoError(t, last)
}

func (n *Node) checkClean() error {
	var errs []error
	mounts, err := mountsBelow(filepath.Join(n.RunDir(), "mounts"))
	if err != nil {
		return err
	}
	for _, m := range mounts {
		errs = append(errs, fmt.Errorf("volume mount left: %s", m))
	}
	leases, err := n.Leases()
	if err != nil {
		return err
	}
	for _, l := range leases {
		errs = append(errs, fmt.Errorf("lease left: %s", l))
	}
	pids, err := n.paths.processes()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if words := strings.Split(string(command), "\x00"); !n.isProgram(words[0]) {
			errs = append(errs, fmt.Errorf("process left: %d %q", pid, words))
		}
	}
	return errors.Join(errs...)
}

// isProgram tells the node's own programs from those that serve containers.
func (n *Node) isProgram(argv0 string) bool {
	for _, name := range []string{"crio", "ocihold", "registry", "registry-proxy"} {
		if argv0 == n.paths.bin(name) {
			return true
		}
	}
	return false
}

// Leases lists the ids of the images that ocihold holds in CRI-O's root, as the
// root's own files say.
func (n *Node) Leases() ([]string, error) {
	content, err := os.ReadFile(filepath.Join(n.CRIORoot(), "overlay-containers", "containers.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var records []struct {
		Names []string `json:"names"`
	}
	if err := json.Unmarshal(content, &records); err != nil {
		return nil, fmt.Errorf("read the container records: %w", err)
	}
	var ids []string
	for _, r := range records {
		for _, name := range r.Names {
			if id, ok := strings.CutPrefix(name, leasePrefix); ok {
				ids = append(ids, id)
			}
		}
	}
	return ids, nil
}
