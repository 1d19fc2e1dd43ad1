package storage

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What a short name may be pulled by is what registries.conf says at that moment,
// for who asks before a pull as for the pull.
func TestPullNamesAfterAChange(t *testing.T) {
	opt := testOptions(t)
	root, err := Open(opt)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, root.Close()) })
	for _, registry := range []string{"a.example", "b.example"} {
		write(t, opt.RegistriesConf, fmt.Sprintf("unqualified-search-registries = [%q]\n", registry))
		names, err := root.PullNames("model:1")
		require.NoError(t, err)
		assert.Equal(t, []string{registry + "/model:1"}, names)
	}
}
