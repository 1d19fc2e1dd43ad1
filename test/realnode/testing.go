package realnode

import (
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Boot boots a node for one test and brings it down at the test's end, when it
// also shows the logs of a test that failed. An empty Dir means a fresh one,
// with a short name, as unix sockets need: the test's own name may be long. With
// OCIHOLD_RACE in the environment, a data race in ocihold fails the test.
func Boot(t *testing.T, o Options) *Node {
	t.Helper()
	if o.Dir == "" {
		dir, err := os.MkdirTemp("", "node")
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
		o.Dir = dir
	}
	n, err := Up(t.Context(), o)
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(n.logTail(CRIO))
			if !o.WithoutOcihold {
				t.Log(n.logTail(Ocihold))
			}
		}
		races := n.races()
		require.NoError(t, n.Down(context.WithoutCancel(t.Context())))
		assert.Empty(t, races, "data races in ocihold")
	})
	return n
}

// PID is the process id of one program of the node, which runs.
func (n *Node) PID(t testing.TB, name string) int {
	t.Helper()
	record, err := os.ReadFile(n.paths.pid(name))
	require.NoError(t, err)
	var p process
	require.NoError(t, json.Unmarshal(record, &p))
	return p.PID
}

// races returns what the race detector has written into ocihold's log.
func (n *Node) races() string {
	log, err := os.ReadFile(n.paths.log(Ocihold))
	if err != nil {
		return ""
	}
	_, reports, _ := strings.Cut(string(log), "WARNING: DATA RACE")
	return reports
}
