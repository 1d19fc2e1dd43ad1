package storage

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"
)

const (
	// keptKey is the item of the child layer's big data that holds a copy of the leased image's record: what a forced
	// removal takes and the layers do not have.
	keptKey = "ocihold-image"
	// keptVersion is that of the item's content.
	keptVersion = 1
)

// keptImage is an image's record.
type keptImage struct {
	Version  int           `json:"version"`
	Names    []string      `json:"names,omitempty"`
	Digest   digest.Digest `json:"digest,omitempty"`
	Metadata string        `json:"metadata,omitempty"`
	Created  time.Time     `json:"created"`
	Items    []keptItem    `json:"items"`
}

// keptItem is a piece of the image's big data, such as its manifest or its config: a cstorage.ImageBigDataOption.
type keptItem struct {
	Key    string        `json:"key"`
	Data   []byte        `json:"content"`
	Digest digest.Digest `json:"digest"`
}

// keepRecord copies the image's record to the child layer, where it is not kept yet.
func (r *Root) keepRecord(record *cstorage.Image, child string) error {
	if old, err := r.store.LayerBigData(child, keptKey); err == nil {
		return old.Close()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	kept := keptImage{
		Version: keptVersion, Names: record.Names, Digest: record.Digest, Metadata: record.Metadata, Created: record.Created,
	}
	items, err := r.bigData(record, record.BigDataNames)
	if err != nil {
		return err
	}
	for _, item := range items {
		kept.Items = append(kept.Items, keptItem(item))
	}
	content, err := json.Marshal(kept)
	if err != nil {
		return err
	}
	return r.store.SetLayerBigData(child, keptKey, bytes.NewReader(content))
}

// restore makes the record of a leased image again that was removed by force, from what its lease kept. The image has
// the names again that no other has by now. It returns ErrNotFound where the image is gone and nothing was kept of it.
func (r *Root) restore(imageID string) error {
	if _, err := r.resolveID(imageID); !errors.Is(err, ErrNotFound) {
		return err
	}
	child, err := r.store.Layer(leaseIDs(imageID).child)
	if errors.Is(err, cstorage.ErrLayerUnknown) {
		return ErrNotFound
	}
	if err != nil {
		return err
	}
	kept, err := r.kept(child.ID)
	if err != nil {
		return err
	}
	options := &cstorage.ImageOptions{CreationDate: kept.Created, Digest: kept.Digest}
	for _, item := range kept.Items {
		options.BigData = append(options.BigData, cstorage.ImageBigDataOption(item))
	}
	var names []string
	for _, name := range kept.Names {
		if _, err := r.store.Image(name); errors.Is(err, cstorage.ErrImageUnknown) {
			names = append(names, name)
		}
	}
	if _, err := r.store.CreateImage(imageID, names, child.Parent, kept.Metadata, options); err != nil &&
		!errors.Is(err, cstorage.ErrDuplicateID) {
		return fmt.Errorf("make its record again: %w", err)
	}
	r.log.WithField("id", imageID).WithField("names", names).Warn("image in use was removed by force; its record is made again")
	return nil
}

// kept reads what the child layer keeps. It returns ErrNotFound where that is nothing that this version can use.
func (r *Root) kept(child string) (keptImage, error) {
	file, err := r.store.LayerBigData(child, keptKey)
	if errors.Is(err, fs.ErrNotExist) {
		return keptImage{}, ErrNotFound
	}
	if err != nil {
		return keptImage{}, err
	}
	content, err := io.ReadAll(file)
	if err = errors.Join(err, file.Close()); err != nil {
		return keptImage{}, err
	}
	var kept keptImage
	if err := json.Unmarshal(content, &kept); err != nil || kept.Version != keptVersion {
		return keptImage{}, ErrNotFound
	}
	return kept, nil
}
