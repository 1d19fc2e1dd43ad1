package imagevolume_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// lists answers with the sandboxes.
func lists(ids ...string) func(context.Context) (map[string]bool, error) {
	return func(context.Context) (map[string]bool, error) {
		all := map[string]bool{}
		for _, id := range ids {
			all[id] = true
		}
		return all, nil
	}
}

func TestUnlistedSandboxIsForgotten(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := pod("p", volumeA)
		w.RunPod(p)
		w.wait()
		require.Equal(t, []string{"pull reg/a:1", "lease a"}, w.store.calls())
		compare := func(list func(context.Context) (map[string]bool, error)) {
			require.NoError(t, w.CompareListed(t.Context(), list))
			w.wait()
		}
		compare(lists("q")) // it is being made, perhaps
		compare(lists("p"))
		compare(lists())
		require.EqualError(t, w.CompareListed(t.Context(), func(context.Context) (map[string]bool, error) {
			return nil, errors.New("it does not answer")
		}), "list sandboxes: it does not answer")
		assert.Empty(t, w.store.calls())
		assert.True(t, w.mounts.Mounted(id("a")))

		compare(lists())
		assert.False(t, w.mounts.Mounted(id("a")))
		assert.Equal(t, []string{"release a"}, w.store.calls())
		compare(lists())

		_, err := w.CreateContainer(p, container("c"))
		require.ErrorContains(t, err, "will be tried again", "it was there after all")
		w.wait()
		_, err = w.CreateContainer(p, container("c"))
		require.NoError(t, err)
	}))
}

func TestSandboxRunMeanwhileIsNotForgotten(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		for range 3 {
			require.NoError(t, w.CompareListed(t.Context(), func(context.Context) (map[string]bool, error) {
				w.RemovePod("p")
				w.RunPod(pod("p", volumeA)) // another of that name
				return nil, nil
			}))
		}
		w.wait()
		assert.True(t, w.mounts.Mounted(id("a")))
	}))
}
