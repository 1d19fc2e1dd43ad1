package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/realnode"
)

// action is what a node is about while a fault strikes. Its attempts are made one
// after the other until all is over, and may fail.
type action struct {
	name string
	// prepare sets up for the handler and returns the attempt.
	prepare func(t *testing.T, m *matrix, handler string) func(ctx context.Context, i int) error
}

// Actions that rules name.
const (
	idle     = "idle"
	creating = "create"
)

var actions = []action{
	{idle, func(*testing.T, *matrix, string) func(context.Context, int) error {
		return func(ctx context.Context, _ int) error {
			<-ctx.Done()
			return nil
		}
	}},
	{"pull", func(_ *testing.T, m *matrix, handler string) func(context.Context, int) error {
		return func(ctx context.Context, i int) error {
			app := m.apps[i%len(m.apps)]
			_, err := m.pullInto(ctx, handler, app.ref)
			return errors.Join(err, m.removeFrom(ctx, handler, m.apps[(i+1)%len(m.apps)].ref))
		}
	}},
	{creating, func(t *testing.T, m *matrix, handler string) func(context.Context, int) error {
		pod := m.volumePod(t, handler, m.apps[0])
		return func(ctx context.Context, i int) error {
			call, done := patient(ctx)
			defer done()
			c, err := pod.Run(call, realnode.ContainerSpec{Attempt: uint32(i)})
			if err != nil {
				return err
			}
			return errors.Join(m.reads(call, c, m.apps[0]), c.Remove(call))
		}
	}},
	{"remove", func(t *testing.T, m *matrix, handler string) func(context.Context, int) error {
		var pods []*realnode.Pod
		for _, app := range m.apps {
			pod := m.volumePod(t, handler, app)
			run(t, pod, realnode.ContainerSpec{})
			pods = append(pods, pod)
		}
		return func(ctx context.Context, i int) error {
			app := m.apps[i%len(m.apps)]
			var err error
			if i < len(pods) {
				call, done := patient(ctx)
				defer done()
				err = pods[i].Remove(call)
			} else {
				err = m.try(ctx, handler, app) // which removes its pod
			}
			return errors.Join(err, m.removeFrom(ctx, handler, app.ref))
		}
	}},
	{"sweep", func(_ *testing.T, m *matrix, handler string) func(context.Context, int) error {
		return func(ctx context.Context, i int) error {
			// The collector has an image of vm's root to remove, and the settling a
			// lease and a mount of the handler's.
			app, other := m.apps[i%len(m.apps)], m.apps[(i+1)%len(m.apps)]
			_, err := m.pullInto(ctx, "vm", other.ref)
			if err == nil {
				dir := filepath.Join(m.HandlerRoot("vm"), "overlay-images", other.id)
				err = os.Chtimes(dir, time.Time{}, time.Now().Add(-48*time.Hour))
			}
			return errors.Join(err, m.try(ctx, handler, app), m.ocihold(ctx, "gc"))
		}
	}},
}

// volumePod runs a pod whose containers all have the image.
func (m *matrix) volumePod(t *testing.T, handler string, image pushed) *realnode.Pod {
	t.Helper()
	text, err := json.Marshal([]volume{{Image: image.ref, MountPath: sparedPath}})
	require.NoError(t, err)
	pod, err := m.RunPod(t.Context(), realnode.PodSpec{Handler: handler, Annotations: map[string]string{domain: string(text)}})
	require.NoError(t, err)
	return pod
}

// ocihold runs one of ocihold's commands.
func (n *sparedNode) ocihold(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(n.Dir(), "bin", "ocihold"), append([]string{"--config", n.OciholdConf()}, args...)...)
	cmd.Env = append(os.Environ(), n.Env()...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ocihold %s: %w: %s", args[0], err, out)
	}
	return nil
}
