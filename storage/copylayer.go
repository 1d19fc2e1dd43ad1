package storage

import (
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"

	"github.com/vbatts/tar-split/tar/asm"
	tarstorage "github.com/vbatts/tar-split/tar/storage"
	cstorage "go.podman.io/storage"
)

// copyLayer makes a layer with the content of another, which may be in another root, where the root has none of that
// id. What it reads must have the digest that is recorded with the other layer.
//
// It reads the files of the other layer itself: containers/storage would hold the lock of the other root until it was
// done, and does not read a layer whose lower ones are in a root that this handle does not see.
func (r *Root) copyLayer(ctx context.Context, from *Root, id, as, parent string, names ...string) error {
	switch has, err := r.hasLayer(as); {
	case err != nil:
		return fmt.Errorf("look for layer %s: %w", as, err)
	case has:
		return nil
	}
	layer, err := from.store.Layer(id)
	if err != nil {
		return fmt.Errorf("read layer %s of the root of handler %q: %w", id, from.name, err)
	}
	if layer.UncompressedDigest == "" {
		return fmt.Errorf("copy layer %s of the root of handler %q: %w: the digest of its content is not recorded", id, from.name, ErrUnsupported)
	}
	options := hostMapped()
	options.UncompressedDigest = layer.UncompressedDigest
	options.OriginalDigest = cmp.Or(layer.CompressedDigest, layer.UncompressedDigest)
	if layer.CompressedSize > 0 {
		options.OriginalSize = &layer.CompressedSize
	}
	content, stream := io.Pipe()
	var reading sync.WaitGroup
	reading.Go(func() { stream.CloseWithError(from.writeLayer(ctx, layer, stream)) })
	_, _, err = r.store.PutLayer(as, parent, names, "", false, options, content)
	err = errors.Join(err, content.CloseWithError(err))
	reading.Wait()
	if err != nil && !errors.Is(err, cstorage.ErrDuplicateID) { // another process was faster
		return fmt.Errorf("copy layer %s of the root of handler %q: %w", id, from.name, err)
	}
	return nil
}

// hasLayer tells whether the root itself has the layer.
func (r *Root) hasLayer(id string) (bool, error) {
	layer, err := r.store.Layer(id)
	if errors.Is(err, cstorage.ErrLayerUnknown) {
		return false, nil
	}
	return err == nil && layer.ID == id, err
}

// writeLayer writes the tar archive that the layer was made from. It returns ErrDigestMismatch, once it has written
// all, where that is not what was recorded.
func (r *Root) writeLayer(ctx context.Context, layer *cstorage.Layer, w io.Writer) (err error) {
	diff, err := diffDir(r.homes(), layer.ID)
	if err != nil {
		return err
	}
	files, err := os.OpenRoot(diff)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, files.Close()) }()
	root := filepath.Dir(filepath.Dir(filepath.Dir(diff)))
	headers, err := os.Open(filepath.Join(root, "overlay-layers", layer.ID+".tar-split.gz"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, headers.Close()) }()
	unzipped, err := gzip.NewReader(headers)
	if err != nil {
		return fmt.Errorf("read %s: %w", headers.Name(), err)
	}
	verifier := layer.UncompressedDigest.Verifier()
	w = io.MultiWriter(verifier, untilDone{ctx, w})
	if err := asm.WriteOutputTarStream(layerFiles{files}, tarstorage.NewJSONUnpacker(unzipped), w); err != nil {
		return err
	}
	if !verifier.Verified() {
		return fmt.Errorf("%w: the files in %s are not those that were unpacked there", ErrDigestMismatch, diff)
	}
	return nil
}

// layerFiles are the files of a layer, by their names in its archive.
type layerFiles struct{ root *os.Root }

var _ tarstorage.FileGetter = layerFiles{}

// Get opens a file.
func (f layerFiles) Get(name string) (io.ReadCloser, error) {
	return f.root.Open(path.Join("/", name)[1:])
}

// untilDone writes until its context ends.
type untilDone struct {
	ctx context.Context //nolint:containedctx // that of the one call that writes
	w   io.Writer
}

// Write writes p.
func (u untilDone) Write(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, err
	}
	return u.w.Write(p)
}

// duplicate makes an image record with all that is kept with another, under another id, with other names and on another
// layer. more is kept with it too, and before the rest; the manifest comes last: with it the record is whole.
func (r *Root) duplicate(record *cstorage.Image, id string, names []string, topLayer string, more ...cstorage.ImageBigDataOption) error {
	options := &cstorage.ImageOptions{
		CreationDate: record.Created,
		Digest:       record.Digest,
		Digests:      record.Digests,
		NamesHistory: record.NamesHistory,
		Flags:        record.Flags,
		BigData:      more,
	}
	apart := func(key string) bool { return key == mendsKey || key == cstorage.ImageDigestBigDataKey }
	items, err := r.bigData(record, append(slices.DeleteFunc(slices.Clone(record.BigDataNames), apart), cstorage.ImageDigestBigDataKey))
	if err != nil {
		return err
	}
	options.BigData = append(options.BigData, items...)
	if _, err := r.store.CreateImage(id, names, topLayer, record.Metadata, options); err != nil {
		return fmt.Errorf("record image %s: %w", id, err)
	}
	return nil
}

// bigData reads what is kept with an image under the keys, in their order.
func (r *Root) bigData(record *cstorage.Image, keys []string) ([]cstorage.ImageBigDataOption, error) {
	items := make([]cstorage.ImageBigDataOption, 0, len(keys))
	for _, key := range keys {
		data, err := r.store.ImageBigData(record.ID, key)
		if err != nil {
			return nil, fmt.Errorf("read %s of image %s: %w", key, record.ID, err)
		}
		items = append(items, cstorage.ImageBigDataOption{Key: key, Data: data, Digest: record.BigDataDigests[key]})
	}
	return items, nil
}
