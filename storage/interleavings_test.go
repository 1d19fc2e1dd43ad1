package storage

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestInterleavings pulls and removes images that share layers, by us and by CRI-O, in random order.
func TestInterleavings(t *testing.T) {
	reg := newRegistry(t)
	var refs []string
	for i, contents := range [][]string{{"a"}, {"a", "b"}, {"a", "b", "c"}, {"a", "d"}, {"e"}} {
		ref := fmt.Sprintf("img%d:1", i)
		reg.push(t, ref, imageOf(t, contents...))
		refs = append(refs, reg.host+"/"+ref)
	}
	for range 3 {
		seed := rand.Uint64()
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			node := newNode(t, "vm", "wasm")
			for range 20 {
				ref := refs[random.IntN(len(refs))]
				switch random.IntN(8) {
				case 0:
					node.pull(t, "default", ref)
					t.Log("pulled to default", ref)
				case 1, 2:
					handler := node.handlers[random.IntN(2)].Name
					node.pull(t, handler, ref)
					t.Log("pulled to", handler, ref)
				case 3, 4:
					require.NoError(t, node.crio("pull", ref))
					t.Log("pulled by CRI-O", ref)
				case 5:
					leans, err := node.roots.Leaning(t.Context())
					require.NoError(t, err)
					for _, lean := range leans {
						require.NoError(t, node.roots.Mend(t.Context(), lean.ImageID, nil))
						t.Log("mended", lean.Names)
					}
					leans, err = node.roots.Leaning(t.Context())
					require.NoError(t, err)
					assert.Empty(t, leans)
				default:
					if err := node.roots.Remove(t.Context(), ref, nil); err != nil {
						require.ErrorIs(t, err, ErrNotFound)
					}
					t.Log("removed", ref)
				}
				require.NoError(t, node.crio("check"))
			}
			for _, ref := range refs {
				if err := node.roots.Remove(t.Context(), ref, nil); err != nil {
					require.ErrorIs(t, err, ErrNotFound)
				}
			}
			require.NoError(t, node.roots.FreeKept(t.Context()))
			for _, name := range node.roots.Names() {
				assert.Empty(t, layerIDs(t, node.root(t, name)), name)
			}
		})
	}
}
