package imageservice

import (
	"context"
	"errors"
	"sync"
	"time"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/storage"
)

// streamedBytes bounds one message of StreamImages, in bytes of its images. It is well under what clients take.
const streamedBytes = 1 << 20

// crioListLimit bounds how long a list waits for CRI-O's part of it.
const crioListLimit = 10 * time.Second

// ListImages lists the images of all roots and what only CRI-O has. A filter's image, as with CRI-O, is one to look up.
func (s *Service) ListImages(ctx context.Context, req *cri.ListImagesRequest) (*cri.ListImagesResponse, error) {
	images, err := s.list(ctx, req.GetFilter())
	if err != nil {
		return nil, asStatus(err)
	}
	return &cri.ListImagesResponse{Images: images}, nil
}

// StreamImages is ListImages in any number of messages.
func (s *Service) StreamImages(req *cri.StreamImagesRequest, stream grpc.ServerStreamingServer[cri.StreamImagesResponse]) error {
	images, err := s.list(stream.Context(), req.GetFilter())
	if err != nil {
		return asStatus(err)
	}
	for len(images) > 0 {
		n, bytes := 0, 0
		for n < len(images) && (n == 0 || bytes < streamedBytes) {
			bytes += len(images[n].String())
			n++
		}
		if err := stream.Send(&cri.StreamImagesResponse{Images: images[:n]}); err != nil {
			return err
		}
		images = images[n:]
	}
	return nil
}

func (s *Service) list(ctx context.Context, filter *cri.ImageFilter) ([]*cri.Image, error) {
	if spec := filter.GetImage(); spec.GetImage() != "" {
		image, err := s.status(ctx, spec)
		if err != nil || image.cri == nil {
			return nil, err
		}
		return []*cri.Image{image.cri}, nil
	}

	found, errs := s.roots.List(ctx)
	for _, err := range errs {
		if !errors.Is(err, storage.ErrBadRecord) && !storage.IsAway(err) {
			return nil, err
		}
	}
	images := make([]*cri.Image, 0, len(found))
	ours := make(map[string]struct{}, len(found))
	for _, image := range found {
		ours[image.ID] = struct{}{}
		config, err := s.config(ctx, image)
		switch {
		case errors.Is(err, storage.ErrNotFound), storage.IsAway(err):
			continue // gone meanwhile
		case err != nil:
			errs = append(errs, err)
			continue
		}
		images = append(images, s.criImage(image, config))
	}
	theirs, err := s.listCRIO(ctx)
	if err != nil {
		errs = append(errs, err)
	}
	for _, image := range theirs {
		if _, ok := ours[image.GetId()]; !ok {
			images = append(images, image)
		}
	}
	s.faults.log(s.log, "image list is not whole", errs)
	return images, nil
}

// config reads the config of an image in the first of its roots.
func (s *Service) config(ctx context.Context, image storage.ImageAt) (ispec.Image, error) {
	root, err := s.roots.Handler(image.Handlers[0])
	if err != nil {
		return ispec.Image{}, err
	}
	return storage.Bounded(root, func() (ispec.Image, error) { return root.Config(ctx, image.ID) })
}

// listCRIO returns what CRI-O lists.
func (s *Service) listCRIO(ctx context.Context) ([]*cri.Image, error) {
	ctx, cancel := context.WithTimeout(ctx, crioListLimit)
	defer cancel()
	resp, err := s.images.ListImages(ctx, &cri.ListImagesRequest{})
	if err != nil {
		return nil, fromCRIO(s.crio, err)
	}
	return resp.GetImages(), nil
}

// faults are what was wrong with the last list. kubelet asks for one all the time; the log has each fault when it comes
// up.
type faults struct {
	mu    sync.Mutex
	known map[string]struct{}
}

func (f *faults) log(log interface{ Warn(args ...any) }, what string, errs []error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := make(map[string]struct{}, len(errs))
	for _, err := range errs {
		now[err.Error()] = struct{}{}
	}
	for text := range now {
		if _, ok := f.known[text]; !ok {
			log.Warn(what + ": " + text)
		}
	}
	f.known = now
}
