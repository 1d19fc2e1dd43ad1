package storage

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMarkerFormat(t *testing.T) {
	for content, want := range map[string]string{"vm\n": "vm", "vm": "vm", "vm\nformat 1\n": "vm", "vm\nformat 2\n": "", "vm\nformat x\n": ""} {
		handler, err := parseMarker(content)
		assert.Equal(t, want, handler, content)
		if want == "" {
			require.ErrorIs(t, err, ErrNewer, content)
		} else {
			require.NoError(t, err, content)
		}
	}
	opt := testOptions(t)
	opt.Marker = true
	require.NoError(t, PrepareRoot(opt))
	write(t, filepath.Join(opt.GraphRoot, markerFile), opt.Name+"\nformat 2\n")
	_, err := Open(opt)
	require.ErrorIs(t, err, ErrNewer)
	require.NotErrorIs(t, err, ErrUnmounted)
	require.ErrorIs(t, PrepareRoot(opt), ErrNewer)
}

// What a newer version has leased, this one neither takes for its own nor lets go.
func TestLeaseFormat(t *testing.T) {
	root, _, image, _ := pulled(t)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	record := leaseIDs(image.ID).record
	require.NoError(t, root.store.SetMetadata(record, `{"ocihold_format":2}`))
	_, err := root.Leases(t.Context())
	require.ErrorIs(t, err, ErrNewer)
	require.ErrorIs(t, root.Release(t.Context(), image.ID), ErrNewer)
	require.ErrorIs(t, root.Lease(t.Context(), image.ID), ErrNewer)
	_, err = root.store.Container(record)
	require.NoError(t, err)
	require.NoError(t, root.store.SetMetadata(record, `{"ocihold_format":1,"more":true}`))
	require.NoError(t, root.Release(t.Context(), image.ID))
}
