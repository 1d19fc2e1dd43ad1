package realnode

import (
	"context"
	"errors"
	"os"
)

// Reboot ends the node as a loss of power does, and starts the programs again.
func (n *Node) Reboot(ctx context.Context) error {
	if err := n.Halt(ctx); err != nil {
		return err
	}
	return n.Resume(ctx)
}

// Halt ends the node as a loss of power does: every process at once, and with
// them mounts, cgroups and what is below run, which is a tmpfs on a node.
func (n *Node) Halt(ctx context.Context) error {
	n.Close()
	n.conn, n.images = nil, nil
	sweep, cancel := context.WithTimeout(ctx, sweepLimit)
	defer cancel()
	if err := n.paths.endProcesses(sweep); err != nil {
		return err
	}
	return errors.Join(n.paths.unmountAll(), n.paths.removeCgroups(sweep), os.RemoveAll(n.paths.in("run")))
}

// Resume starts the programs of a node that was halted.
func (n *Node) Resume(ctx context.Context) error {
	for _, d := range n.paths.dirs() {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	for _, name := range []string{Proxy, Registry, CRIO, Ocihold} {
		if err := n.Start(ctx, name); err != nil {
			return err
		}
	}
	return nil
}
