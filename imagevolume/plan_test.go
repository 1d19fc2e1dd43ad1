package imagevolume

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume/hostmount"
	"github.com/ocihold/ocihold/imagevolume/request"
)

// ids makes image IDs, one of each letter.
func ids(letters string) []string {
	all := make([]string, len(letters))
	for i := range letters {
		all[i] = strings.Repeat(letters[i:i+1], fullID)
	}
	return all
}

func short(letter string) string { return strings.Repeat(letter, shortID) }

// The hashes are to stay: a later version finds the mounts of running containers by
// them.
func TestPlan(t *testing.T) {
	tar := request.Source{MediaTypes: []string{"*tar*", "*gz", "*tar*"}}
	for _, tc := range []struct {
		name    string
		root    string
		sources []request.Source
		ids     string
		want    []step
	}{
		{"all of an image", "", []request.Source{{}}, "a", []step{{key: ids("a")[0], layers: part{ImageID: ids("a")[0]}}}},
		{"in a root", "v.m", []request.Source{{}}, "a", []step{{key: "v.m." + ids("a")[0], layers: part{ImageID: ids("a")[0]}}}},
		{"some layers", "vm", []request.Source{tar}, "a", []step{
			{key: "vm." + short("a") + "~6bc2a4293a69d843", layers: part{ImageID: ids("a")[0], MediaTypes: []string{"*gz", "*tar*"}}},
		}},
		{"a sub path", "", []request.Source{{SubPath: "w"}}, "a", []step{
			{key: ids("a")[0], layers: part{ImageID: ids("a")[0]}},
			{key: short("a") + "~f73fc06f17bf1192", parts: []hostmount.Part{{Key: ids("a")[0], Path: "w"}}},
		}},
		{"two, the last on top", "", []request.Source{{}, {SubPath: "w"}}, "ab", []step{
			{key: ids("b")[0], layers: part{ImageID: ids("b")[0]}},
			{key: ids("a")[0], layers: part{ImageID: ids("a")[0]}},
			{key: short("a") + "+" + short("b") + "~c914676a48727d03", parts: []hostmount.Part{{Key: ids("b")[0], Path: "w"}, {Key: ids("a")[0]}}},
		}},
		{"one between itself", "", []request.Source{{}, {}, {}}, "aba", []step{
			{key: ids("a")[0], layers: part{ImageID: ids("a")[0]}},
			{key: ids("b")[0], layers: part{ImageID: ids("b")[0]}},
			{key: short("a") + "+" + short("b") + "+" + short("a") + "~dc3a01bd3d1b5d27", parts: []hostmount.Part{{Key: ids("a")[0]}, {Key: ids("b")[0]}}},
		}},
		{"one over itself", "", []request.Source{{}, {}}, "aa", []step{
			{key: ids("a")[0], layers: part{ImageID: ids("a")[0]}},
			{key: short("a") + "+" + short("a") + "~bd7e1f7b360d8d7a", parts: []hostmount.Part{{Key: ids("a")[0]}}},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			steps, err := contentOf(tc.root, tc.sources, ids(tc.ids)).plan()
			require.NoError(t, err)
			assert.Equal(t, tc.want, steps)
			key := steps[len(steps)-1].key
			k := parseKey(key)
			assert.Equal(t, tc.root, k.root)
			for _, id := range ids(tc.ids) {
				assert.True(t, k.has(Image{Root: tc.root, ID: id}))
				assert.False(t, k.has(Image{Root: "other", ID: id}))
			}
			assert.False(t, k.has(Image{Root: tc.root, ID: ids("f")[0]}))
			assert.Equal(t, ids(tc.ids), identify(key, "", tc.sources, ids("abcdef")))
		})
	}
}

func TestKeysOfOtherContentsDiffer(t *testing.T) {
	seen := map[string]string{}
	for name, c := range map[string]content{
		"whole":          contentOf("", []request.Source{{}}, ids("a")),
		"root":           contentOf("vm", []request.Source{{}}, ids("a")),
		"sub path":       contentOf("", []request.Source{{SubPath: "a"}}, ids("a")),
		"sub path, root": contentOf("vm", []request.Source{{SubPath: "a"}}, ids("a")),
		"other path":     contentOf("", []request.Source{{SubPath: "b"}}, ids("a")),
		"type":           contentOf("", []request.Source{{MediaTypes: []string{"a"}}}, ids("a")),
		"two types":      contentOf("", []request.Source{{MediaTypes: []string{"a", "b"}}}, ids("a")),
		"id map":         {Parts: []part{{ImageID: ids("a")[0]}}, IDMap: "uid 0 1 1"},
		"other id map":   {Parts: []part{{ImageID: ids("a")[0]}}, IDMap: "uid 0 2 1"},
		"twice":          contentOf("", []request.Source{{}, {}}, ids("aa")),
		"a, b":           contentOf("", []request.Source{{}, {}}, ids("ab")),
		"b, a":           contentOf("", []request.Source{{}, {}}, ids("ba")),
		"a/a, b":         contentOf("", []request.Source{{SubPath: "a"}, {}}, ids("ab")),
		"a, b/a":         contentOf("", []request.Source{{}, {SubPath: "a"}}, ids("ab")),
	} {
		assert.Empty(t, seen[c.key()], "%s has the key of another", name)
		seen[c.key()] = name
	}
	assert.Equal(t,
		contentOf("", []request.Source{{MediaTypes: []string{"a", "b"}}}, ids("a")).key(),
		contentOf("", []request.Source{{MediaTypes: []string{"b", "a", "b"}}}, ids("a")).key(), "order does not matter")
}

func TestLongestKey(t *testing.T) {
	eight := make([]request.Source, 8)
	steps, err := contentOf(strings.Repeat("r", 39), eight, ids("abcdefab")).plan()
	require.NoError(t, err)
	assert.Len(t, steps[len(steps)-1].key, hostmount.MaxKey)
	_, err = contentOf(strings.Repeat("r", 40), eight, ids("abcdefab")).plan()
	require.ErrorContains(t, err, "use fewer images")
}

func TestParseKeyOfAnotherVersion(t *testing.T) {
	for _, key := range []string{
		"", "k", ids("a")[0][1:], ids("a")[0] + "a", short("a"), short("a") + "~", "~" + short("a"), short("a") + "+~" + short("a"),
		short("A") + "~" + short("a"), "." + ids("a")[0], ids("a")[0] + "~" + short("a"), "v2." + short("a") + "~" + short("a") + "~x",
	} {
		assert.True(t, parseKey(key).unknown, key)
		for _, root := range []string{"", "vm"} {
			assert.True(t, parseKey(key).has(Image{Root: root, ID: ids("a")[0]}), "%s might be of any image", key)
		}
	}
}

func TestIdentify(t *testing.T) {
	twins := []string{short("a") + strings.Repeat("1", 48), short("a") + strings.Repeat("2", 48), ids("b")[0]}
	sources := []request.Source{{SubPath: "x"}, {}}
	key := contentOf("vm", sources, []string{twins[1], twins[2]}).key()
	assert.Equal(t, []string{twins[1], twins[2]}, identify(key, "", sources, twins), "the hash tells images apart that begin alike")
	assert.Nil(t, identify(key, "", sources, twins[:2]), "one is not known")
	assert.Nil(t, identify(key, "", sources[:1], twins), "another volume")
	assert.Nil(t, identify(key, "", []request.Source{{SubPath: "y"}, {}}, twins), "another path")
	assert.Nil(t, identify(key, "uid 0 1 1", sources, twins), "another id map")
	assert.Equal(t, ids("a"), identify(ids("a")[0], "", sources[1:], nil), "all of an image is known by itself")
	assert.Nil(t, identify(ids("a")[0], "", sources[:1], ids("a")))
	assert.Nil(t, identify("k", "", sources, twins))
}
