package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/sirupsen/logrus"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/pkg/shortnames"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/signature"
	istorage "go.podman.io/image/v5/storage"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
)

// PullOptions say how to pull.
type PullOptions struct {
	// Auth, if not nil, is used in place of what the node's files have for the registry. Only callers with the same
	// credentials share a transfer, and each asks the registry for the manifest with its own.
	Auth *Auth
	// AuthFile and SignaturePolicy, if not empty, replace the root's for this pull.
	AuthFile, SignaturePolicy string
	// Namespace is that of the pod whose pull this is; empty where it is no pod's. A pull with Auth or AuthFile proves
	// access to the image for this namespace alone; see Proven.
	Namespace string
	// Limit refuses an image whose layers have more bytes in all, as its manifest lists them, before one of them is
	// transferred, or unpacked, and also where the root has the image already.
	Limit Limit
	// Progress, if not nil, is called as the pull goes on: at least once where there is something to transfer, about
	// five times a second at most, one call at a time, and never after Pull has returned. It holds the transfer up
	// until it returns, and must not call methods of the Root.
	Progress func(Progress)
}

// key differs for all options under which a pull may come out in another way.
func (o PullOptions) key() string {
	return fmt.Sprintf("%s %q %q %d", o.Auth.key(), o.AuthFile, o.SignaturePolicy, o.Limit.Bytes)
}

// apply makes sys what the options ask for.
func (o PullOptions) apply(sys *types.SystemContext) {
	o.Auth.apply(sys)
	sys.AuthFilePath = cmp.Or(o.AuthFile, sys.AuthFilePath)
	sys.SignaturePolicyPath = cmp.Or(o.SignaturePolicy, sys.SignaturePolicyPath)
}

// Pull makes sure that the root has what ref names at its registry, for the root's platform, and returns it. Where
// several callers ask for the same with the same credentials, one transfer serves all; each may leave by its ctx, and
// with the last the transfer ends.
//
// A short name is looked for as registries.conf says, at each of its candidates until one has it. The image then has
// the name it was pulled by, normalized: repository:tag, or repository@digest where ref has a digest.
//
// Where the root has that manifest under that name already, the only request is the one for the manifest; a signature
// policy that asks for signatures adds the requests for them.
//
// A registry that answers 5xx or breaks off is tried again a few times, at growing intervals; layers that were finished
// are not transferred again. A transfer for which nothing comes for Options.StallTimeout ends with
// ErrRegistryUnavailable.
//
// Errors that wrap ErrNotFound, ErrInvalidReference, ErrUnauthorized, ErrRegistryUnavailable, ErrDigestMismatch,
// ErrSignature, ErrEncrypted, ErrInvalidArtifact, ErrTooLarge, ErrUnsupported, ErrDiskFull or ErrClosed say what has to
// change; ctx's error means that the caller left.
func (r *Root) Pull(ctx context.Context, ref string, opt PullOptions) (Image, error) {
	if err := r.usable(ctx); err != nil {
		return Image{}, fmt.Errorf("pull %q: %w", ref, err)
	}
	candidates, err := r.pullCandidates(ref)
	if err != nil {
		return Image{}, fmt.Errorf("pull %q: %w", ref, err)
	}
	image, err := r.pulls.do(ctx, strings.Join(textOf(candidates), " ")+"\n"+opt.key(), opt.Progress, func(ctx context.Context, report func(Progress)) (Image, error) {
		image, err := r.pullFirst(ctx, candidates, opt, report)
		r.suspect(err)
		r.countPull(err)
		if err != nil && ctx.Err() != nil {
			r.log.WithField("image", ref).WithError(context.Cause(ctx)).Info("pull cancelled")
		}
		return image, err
	})
	r.tellPulled()
	if err != nil {
		return Image{}, fmt.Errorf("pull %q: %w", ref, err)
	}
	r.recordAccess(image.ID, opt.byCaller()) // of this caller, who may have shared another's transfer
	return image, nil
}

// pullCandidates returns the full names that ref may stand for, with a tag or a digest each; at least one.
func (r *Root) pullCandidates(ref string) ([]reference.Named, error) {
	if _, err := parseName(ref); err != nil {
		return nil, err
	}
	sysregistriesv2.InvalidateCache() // what registries.conf says now counts
	// Like CRI-O, which has no one to ask: try every candidate.
	sys := r.sys
	mode := types.ShortNameModeDisabled
	sys.ShortNameMode = &mode
	resolved, err := shortnames.Resolve(&sys, ref)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidReference, err)
	}
	candidates := make([]reference.Named, 0, len(resolved.PullCandidates))
	for _, c := range resolved.PullCandidates {
		named, err := withoutTagBesideDigest(c.Value)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrInvalidReference, err)
		}
		candidates = append(candidates, named)
	}
	return candidates, nil
}

// pullFirst pulls the first candidate that can be pulled.
func (r *Root) pullFirst(ctx context.Context, candidates []reference.Named, opt PullOptions, report func(Progress)) (Image, error) {
	var failed error
	for _, named := range candidates {
		image, err := r.retrying(ctx, func() (Image, error) { return r.pullOne(ctx, named, opt, report) })
		if err == nil {
			return image, nil
		}
		if ctx.Err() != nil {
			return Image{}, err
		}
		err = classify(reference.Domain(named), steady{err})
		switch {
		case len(candidates) == 1:
			return Image{}, err
		case failed == nil:
			failed = fmt.Errorf("%s: %w", named, err)
		default:
			failed = fmt.Errorf("%w; %s: %w", failed, named, err)
		}
	}
	return Image{}, failed
}

func (r *Root) pullOne(ctx context.Context, named reference.Named, opt PullOptions, report func(Progress)) (Image, error) {
	sys := r.system(ctx, named, opt)
	arrived := func() {}
	defer func() { arrived() }()
	image, err := r.bring(ctx, named, &sys, report, func(known knows) (*source, error) {
		src, err := r.openSource(ctx, named, &sys, known)
		if err == nil {
			if large := checkSize(src.layers, opt.Limit); large != nil {
				return nil, errors.Join(large, src.Close())
			}
			src.limit = opt.Limit
			src.announce = func(imageID string) { arrived = r.arriving.add(imageID, named.String()) }
		}
		return src, err
	})
	if err != nil {
		return Image{}, err
	}
	r.recordAccess(image.ID, r.provenBy(named, image.ID, opt))
	return image, r.checkSize(image.ID, opt.Limit) // of one that was there, too
}

// bring makes sure that the root has what the source has, under that name, if the signature policy allows it.
func (r *Root) bring(ctx context.Context, named reference.Named, sys *types.SystemContext, report func(Progress), open func(knows) (*source, error)) (_ Image, err error) {
	trust, err := signature.DefaultPolicy(sys)
	if err != nil {
		return Image{}, fmt.Errorf("read the signature policy: %w", err)
	}
	policy, err := signature.NewPolicyContext(trust)
	if err != nil {
		return Image{}, fmt.Errorf("read the signature policy: %w", err)
	}
	defer func() {
		if destroyErr := policy.Destroy(); err == nil && destroyErr != nil {
			err = destroyErr
		}
	}()

	have, has := r.named(named)
	src, err := open(func(top, instance digest.Digest) bool {
		return has && slices.Contains(have.Digests, top) && slices.Contains(have.Digests, instance)
	})
	if err != nil {
		return Image{}, err
	}
	if has && src.presentAs(have.Digests) {
		err := src.allowed(ctx, policy)
		if err == nil {
			err = r.unlockPresent(have.ID, src.digests)
		}
		if closeErr := src.Close(); err == nil {
			err = closeErr
		}
		if err != nil {
			return Image{}, err
		}
		return have, nil
	}
	return r.transfer(ctx, named, src, policy, sys, report)
}

// system says how to speak with the registry of named.
func (r *Root) system(ctx context.Context, named reference.Named, opt PullOptions) types.SystemContext {
	sys := r.sys
	opt.apply(&sys)
	if r.insecure.match(reference.Domain(named), func(host string) ([]net.IP, error) {
		return net.DefaultResolver.LookupIP(ctx, "ip", host)
	}) {
		sys.DockerInsecureSkipTLSVerify = types.OptionalBoolTrue
	}
	return sys
}

// openSource opens the source, unless the registry is silent for too long.
func (r *Root) openSource(ctx context.Context, named reference.Named, sys *types.SystemContext, known knows) (*source, error) {
	stalled := stallError(r.stall)
	ctx, cancel := context.WithTimeoutCause(ctx, r.stall, stalled)
	defer cancel()
	src, err := openSource(ctx, named, sys, known)
	if err != nil && errors.Is(context.Cause(ctx), errStalled) {
		return nil, stalled
	}
	return src, err
}

// named returns the sound image that has exactly this name.
func (r *Root) named(named reference.Named) (Image, bool) {
	record, err := r.store.Image(named.String())
	if err != nil || !slices.Contains(record.Names, named.String()) || errors.Is(r.markUsed(record.ID), ErrNotFound) {
		return Image{}, false
	}
	image, err := r.image(record)
	return image, err == nil
}

// transfer brings what the open source has, which it closes, into the root.
func (r *Root) transfer(ctx context.Context, named reference.Named, src *source, policy *signature.PolicyContext, sys *types.SystemContext, report func(Progress)) (Image, error) {
	var record *cstorage.Image
	var err error
	if src.artifact != nil {
		record, err = r.makeImage(ctx, named, src, policy, report)
	} else {
		record, err = r.copyImage(ctx, named, src, policy, sys, report)
	}
	if err != nil {
		return Image{}, err
	}
	image, err := r.image(record)
	if err != nil {
		return Image{}, fmt.Errorf("read the pulled image: %w", err)
	}
	r.measurePulled(ctx, record)
	r.log.WithFields(logrus.Fields{"image": named.String(), "id": image.ID, "digest": image.Digest.String()}).Info("image pulled")
	return image, nil
}

// copyImage copies an image from its open source, which it closes, into the root.
func (r *Root) copyImage(ctx context.Context, named reference.Named, src *source, policy *signature.PolicyContext, sys *types.SystemContext, report func(Progress)) (*cstorage.Image, error) {
	store := r.boundStore(src)
	destination, err := destination(store, named, src)
	if err != nil {
		return nil, errors.Join(err, src.Close())
	}
	keys, err := r.unlock(src.layers)
	if err != nil {
		return nil, errors.Join(err, src.Close())
	}
	if err := r.takeSlot(ctx); err != nil {
		return nil, errors.Join(err, src.Close())
	}
	defer r.leaveSlot()

	if src.announce != nil {
		src.announce(src.config.Encoded())
	}
	stalled := stallError(r.stall)
	copyCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	requests := &requests{}
	events := make(chan types.ProgressProperties)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		tracker := newTracker(src.layers, report, requests, r.stall, func() {
			if !src.local {
				cancel(stalled)
			}
		})
		tracker.larger = func(err error) { cancel(err) }
		tracker.run(events)
	}()
	var stored types.ImageReference
	_, err = copy.Image(requests.traced(copyCtx), policy, destination, openedReference{src.Reference(), src.ImageSource}, &copy.Options{
		SourceCtx:               sys,
		DestinationCtx:          sys,
		OciDecryptConfig:        keys,
		RemoveSignatures:        keys != nil,     // they were checked, and are of the manifest with encrypted layers
		ProgressInterval:        time.Nanosecond, // every read: the tracker must know when all of a blob has come
		Progress:                events,
		ReportResolvedReference: &stored,
	})
	close(events)
	<-drained
	if cause := context.Cause(copyCtx); err != nil && (errors.Is(cause, errStalled) || errors.Is(cause, istorage.ErrBlobSizeMismatch)) {
		return nil, cause
	}
	if over := store.budget.err; err != nil && over != nil {
		return nil, errors.Join(over, r.removeRests(store.top))
	}
	if err != nil {
		return nil, err
	}
	_, record, err := istorage.ResolveReference(stored)
	if err != nil {
		return nil, fmt.Errorf("read the pulled image: %w", err)
	}
	if len(src.manifests) > 0 {
		if record, err = r.addManifests(record.ID, named, src.manifests); err != nil {
			return nil, fmt.Errorf("record the manifests of the pulled image: %w", err)
		}
	}
	return record, nil
}

// destination is where to copy to: the name, or the id alone for what may have a digest as its name that containers/image
// does not come to: an index around an index, or the manifest of an encrypted image.
func destination(store cstorage.Store, named reference.Named, src *source) (types.ImageReference, error) {
	if len(src.manifests) > 0 {
		return istorage.Transport.NewStoreReference(store, nil, src.config.Encoded())
	}
	named, err := withoutTagBesideDigest(named)
	if err != nil {
		return nil, err
	}
	return istorage.Transport.NewStoreReference(store, named, "")
}

// addManifests keeps manifests that the image came from with it, as containers/image keeps the outermost, and gives it
// the name.
func (r *Root) addManifests(imageID string, named reference.Named, manifests [][]byte) (*cstorage.Image, error) {
	for _, blob := range manifests {
		d, err := manifest.Digest(blob)
		if err != nil {
			return nil, err
		}
		if err := r.store.SetImageBigData(imageID, manifestKey(d), blob, manifest.Digest); err != nil {
			return nil, err
		}
	}
	if err := r.store.AddNames(imageID, []string{named.String()}); err != nil {
		return nil, err
	}
	return r.store.Image(imageID)
}

// takeSlot waits until the root may have one more transfer.
func (r *Root) takeSlot(ctx context.Context) error {
	if r.slots == nil {
		return nil
	}
	select {
	case r.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (r *Root) leaveSlot() {
	if r.slots != nil {
		<-r.slots
	}
}
