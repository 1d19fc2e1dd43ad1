package storage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"sync"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/docker/config"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/lockfile"
)

const (
	// accessKey is the item of an image's big data that says how access to the image was proven. Pulling the image again
	// leaves it; it goes with the image.
	accessKey = "ocihold-access"
	// accessVersion is that of the item's content. Another version proves nothing.
	accessVersion = 1
)

// access says how access to an image was proven.
type access struct {
	Version int `json:"version"`
	// Anonymous says that the registry gave the image where the node has no credentials for it, Node that it did where
	// the node's files have some, or that the image was imported.
	Anonymous bool `json:"anonymous,omitempty"`
	Node      bool `json:"node,omitempty"`
	// Namespaces are those for whose pods it was pulled with credentials that were not the node's, sorted.
	Namespaces []string `json:"namespaces,omitempty"`
}

func (a access) permits(namespace string) bool {
	return a.Anonymous || a.Node || slices.Contains(a.Namespaces, namespace)
}

// with returns a and what b adds to it.
func (a access) with(b access) access {
	namespaces := union(a.Namespaces, b.Namespaces)
	slices.Sort(namespaces)
	return access{accessVersion, a.Anonymous || b.Anonymous, a.Node || b.Node, namespaces}
}

// parseAccess reads what is kept on an image. What it cannot read proves nothing.
func parseAccess(content []byte) access {
	var a access
	if json.Unmarshal(content, &a) != nil || a.Version != accessVersion {
		return access{Version: accessVersion}
	}
	return a
}

// Proven tells whether access to the image in the root was proven for pods of the namespace: by any pull or [Root.Prove]
// with the node's credentials, of which there may be none, or by a pull for that namespace. It asks no registry; it waits
// for a pull under way that has put the image there and has still to keep what that proves. It returns ErrNotFound.
func (r *Root) Proven(ctx context.Context, imageID, namespace string) (bool, error) {
	if err := r.usable(ctx); err != nil {
		return false, fmt.Errorf("read how access to image %s was proven: %w", imageID, err)
	}
	known, err := r.access(imageID)
	if err != nil {
		return false, fmt.Errorf("read how access to image %s was proven: %w", imageID, err)
	}
	if known.permits(namespace) {
		return true, nil
	}
	record, err := r.resolveID(imageID)
	if err == nil {
		err = r.arriving.wait(ctx, imageID, record.Names)
	}
	if err == nil {
		known, err = r.access(imageID)
	}
	if err != nil {
		return false, fmt.Errorf("read how access to image %s was proven: %w", imageID, err)
	}
	return known.permits(namespace), nil
}

// Prove asks the registries that the image in the root has names of for its manifest, with the node's credentials, and
// keeps on the image that one has it. That is one request where the first has; callers at the same time share it. It
// returns ErrNotFound where the root does not have the image, and ErrUnproven where no registry answers with it.
func (r *Root) Prove(ctx context.Context, imageID string) error {
	if err := r.usable(ctx); err != nil {
		return fmt.Errorf("prove access to image %s: %w", imageID, err)
	}
	_, err := r.pulls.do(ctx, "prove\n"+imageID, nil, func(ctx context.Context, _ func(Progress)) (Image, error) {
		return Image{}, r.prove(ctx, imageID)
	})
	if err != nil {
		return fmt.Errorf("prove access to image %s: %w", imageID, err)
	}
	return nil
}

func (r *Root) prove(ctx context.Context, imageID string) error {
	record, err := r.resolveID(imageID)
	if err != nil {
		return err
	}
	image, err := r.leaningImage(record)
	if err != nil {
		return err
	}
	var repositories []string
	var refused error
	for _, name := range image.Names {
		named, err := parseName(name)
		if err != nil {
			return err
		}
		if slices.Contains(repositories, named.Name()) {
			continue
		}
		repositories = append(repositories, named.Name())
		err = r.askFor(ctx, reference.TrimNamed(named), image)
		if err == nil {
			r.recordAccess(imageID, r.byNode(named))
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		refused = errors.Join(refused, err)
	}
	if refused == nil {
		return fmt.Errorf("%w: the image has no name to ask a registry by", ErrUnproven)
	}
	return fmt.Errorf("%w: %w", ErrUnproven, refused)
}

// askFor asks the repository for any of the image's manifests. Of an encrypted image the node must have the keys, too.
func (r *Root) askFor(ctx context.Context, repository reference.Named, image Image) (err error) {
	for _, d := range image.Digests {
		named, digestErr := reference.WithDigest(repository, d)
		if digestErr != nil {
			return digestErr
		}
		_, err = r.retrying(ctx, func() (Image, error) {
			sys := r.system(ctx, named, PullOptions{})
			src, err := r.openSource(ctx, named, &sys, func(_, _ digest.Digest) bool { return true })
			if err != nil {
				return Image{}, err
			}
			if err := src.Close(); err != nil {
				return Image{}, err
			}
			if !src.presentAs(image.Digests) {
				return Image{}, fmt.Errorf("%w: %s has another one for this platform", ErrNotFound, d)
			}
			return Image{}, r.unlockPresent(image.ID, src.digests)
		})
		if err == nil || ctx.Err() != nil {
			return err
		}
		if err = classify(reference.Domain(named), steady{err}); !errors.Is(err, ErrNotFound) {
			return err
		}
	}
	return err
}

// KeepProof keeps on the image in the root that another program has pulled it for a pod of the namespace. Where the root
// does not have the image it does nothing.
func (r *Root) KeepProof(ctx context.Context, imageID, namespace string) error {
	if err := r.usable(ctx); err != nil {
		return fmt.Errorf("keep a proof of access to image %s: %w", imageID, err)
	}
	if namespace != "" {
		r.recordAccess(imageID, access{Namespaces: []string{namespace}})
	}
	return nil
}

// arrivals are the pulls under way whose manifest the registry has given: the image may be in the root before what proves
// access to it is kept on it. The zero value is ready for use.
type arrivals struct {
	mu      sync.Mutex
	running []*arrival
}

type arrival struct {
	imageID, name string
	ended         chan struct{}
}

// add counts the pull until end is called.
func (a *arrivals) add(imageID, name string) (end func()) {
	added := &arrival{imageID: imageID, name: name, ended: make(chan struct{})}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.running = append(a.running, added)
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.running = slices.DeleteFunc(a.running, func(other *arrival) bool { return other == added })
		close(added.ended)
	}
}

// wait waits for the end of the pulls that bring the image under one of the names. A pull under another name proves
// nothing yet: its registry may have said no more than the id.
func (a *arrivals) wait(ctx context.Context, imageID string, names []string) error {
	a.mu.Lock()
	running := slices.Clone(a.running)
	a.mu.Unlock()
	for _, pull := range running {
		if pull.imageID != imageID || !slices.Contains(names, pull.name) {
			continue
		}
		select {
		case <-pull.ended:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// provenBy is what a pull of the image with these options has proven.
func (r *Root) provenBy(named reference.Named, imageID string, opt PullOptions) access {
	if opt.ownCredentials() {
		return opt.byCaller()
	}
	if known, err := r.access(imageID); err == nil && (known.Anonymous || known.Node) {
		return known // without running a credential helper again
	}
	return r.byNode(named)
}

// ownCredentials says that the pull does not go by the credentials that the node's files have.
func (o PullOptions) ownCredentials() bool { return o.Auth != nil || o.AuthFile != "" }

// byCaller is what a pull with the caller's own credentials proves, which may be nothing.
func (o PullOptions) byCaller() access {
	if !o.ownCredentials() || o.Namespace == "" {
		return access{}
	}
	return access{Namespaces: []string{o.Namespace}}
}

// byNode is the access that the node's files give.
func (r *Root) byNode(named reference.Named) access {
	auth, err := config.GetCredentialsForRef(&r.sys, named)
	anonymous := err == nil && auth == types.DockerAuthConfig{}
	return access{Anonymous: anonymous, Node: !anonymous}
}

// recordAccess adds to what is kept on the image. Where that fails the proof has to be made again, no more.
func (r *Root) recordAccess(imageID string, proven access) {
	if err := r.addAccess(imageID, proven); err != nil && !errors.Is(err, ErrNotFound) {
		r.log.WithField("id", imageID).WithError(err).Warn("how access to an image was proven is not kept")
	}
}

func (r *Root) addAccess(imageID string, proven access) error {
	if known, err := r.access(imageID); err != nil || reflect.DeepEqual(known.with(proven), known) {
		return err
	}
	// Of programs that add at the same time none may lose what another adds.
	lock, err := lockfile.GetLockFile(filepath.Join(r.store.RunRoot(), "ocihold-access.lock"))
	if err != nil {
		return err
	}
	lock.Lock()
	defer lock.Unlock()
	known, err := r.access(imageID)
	if err != nil {
		return err
	}
	content, err := json.Marshal(known.with(proven))
	if err != nil {
		return err
	}
	return unknownImage(r.store.SetImageBigData(imageID, accessKey, content, nil))
}

// access returns what is kept on the image.
func (r *Root) access(imageID string) (access, error) {
	record, err := r.resolveID(imageID)
	if err != nil {
		return access{}, err
	}
	// A removal that was killed may have left the file of an image of this id that was there before.
	if !slices.Contains(record.BigDataNames, accessKey) {
		return access{Version: accessVersion}, nil
	}
	content, err := r.store.ImageBigData(imageID, accessKey)
	if err != nil {
		return access{}, unknownImage(err)
	}
	return parseAccess(content), nil
}

func unknownImage(err error) error {
	if errors.Is(err, cstorage.ErrImageUnknown) {
		return ErrNotFound
	}
	return err
}
