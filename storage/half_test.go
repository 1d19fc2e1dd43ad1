package storage

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestRemoveHalf(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "a"))
	node := newNode(t, "vm")
	whole := node.pull(t, "vm", reg.host+"/a:1")
	nameless := node.pull(t, "default", reg.host+"/a:1")
	require.NoError(t, node.root(t, "default").store.SetNames(nameless.ID, nil))
	for _, handler := range []string{"default", "vm"} {
		_, err := node.root(t, handler).store.CreateImage("", nil, "", "", nil)
		require.NoError(t, err)
	}
	_, errs := node.roots.List(t.Context())
	assert.Len(t, errs, 2)

	require.NoError(t, node.roots.RemoveHalf(t.Context()))
	require.NoError(t, node.crio("check"))
	images, errs := node.roots.List(t.Context())
	assert.Empty(t, errs)
	require.Len(t, images, 1)
	assert.Equal(t, whole.ID, images[0].ID)
	assert.Equal(t, []string{"default", "vm"}, images[0].Handlers)
}
