package realnode

import (
	"context"
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// Boot boots a node for one test and brings it down at the test's end, when it
// also shows the logs of a test that failed. An empty Dir means a fresh one,
// with a short name, as unix sockets need: the test's own name may be long.
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
		require.NoError(t, n.Down(context.WithoutCancel(t.Context())))
	})
	return n
}

// PID is the process id of one program of the node, which runs.
func (n *Node) PID(t *testing.T, name string) int {
	t.Helper()
	record, err := os.ReadFile(n.paths.pid(name))
	require.NoError(t, err)
	var p process
	require.NoError(t, json.Unmarshal(record, &p))
	return p.PID
}
