package imageservice

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/storage"
)

// PullImage pulls into the root of the call's handler and answers with the image's id. An image on layers that CRI-O has
// pulled and that cannot be mended now is CRI-O's to pull, where the handler has no root of its own.
func (s *Service) PullImage(ctx context.Context, req *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	id, err := s.pull(ctx, req)
	if err != nil {
		return nil, asStatus(err)
	}
	return &cri.PullImageResponse{ImageRef: id}, nil
}

func (s *Service) pull(ctx context.Context, req *cri.PullImageRequest) (id string, err error) {
	spec := req.GetImage()
	if spec.GetImage() == "" {
		return "", errNoImage
	}
	chosen, err := s.chooser.Load().choose(spec)
	if err != nil {
		return "", err
	}
	if chosen.CRIOPulls {
		return s.pullByCRIO(ctx, req)
	}
	auth, err := credentials(req.GetAuth())
	if err != nil {
		return "", err
	}
	namespace := req.GetSandboxConfig().GetMetadata().GetNamespace()
	policy, err := s.policyOf(namespace)
	if err != nil {
		return "", err
	}
	file, err := s.takeAuthFile(namespace, spec.GetImage())
	if err != nil {
		return "", err
	}
	defer func() {
		if removeErr := file.remove(); removeErr != nil {
			err = errors.Join(err, fmt.Errorf("remove the auth file of namespace %q: %w", namespace, removeErr))
		}
	}()
	image, err := s.PullInto(ctx, chosen.root(), spec.GetImage(), storage.PullOptions{
		Auth: auth, AuthFile: file.path, SignaturePolicy: policy, Namespace: namespace,
	})
	if errors.Is(err, storage.ErrLeans) && chosen.root() == DefaultRoot {
		s.log.WithField("image", spec.GetImage()).WithError(err).Warn("CRI-O pulls the image: it needs layers of others that cannot be mended now")
		if err := file.giveBack(); err != nil {
			return "", fmt.Errorf("leave the auth file of namespace %q to CRI-O: %w", namespace, err)
		}
		return s.pullByCRIO(ctx, req)
	}
	return image.ID, err
}

// policyOf returns the signature policy of a namespace's own, empty where it has none.
func (s *Service) policyOf(namespace string) (string, error) {
	if namespace == "" || s.policy == "" {
		return "", nil
	}
	file := filepath.Join(s.policy, namespace+".json")
	switch _, err := os.Stat(file); {
	case err == nil:
		return file, nil
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	default:
		return "", fmt.Errorf("look for the signature policy of namespace %q: %w", namespace, err)
	}
}

// Pull pulls into the root of a handler, or, where handler is empty, of the one that PullImage would take for a pod that
// asks for none. Unlike PullImage it never leaves a pull to CRI-O.
func (s *Service) Pull(ctx context.Context, handler, ref string, opt storage.PullOptions) (storage.Image, error) {
	chosen, err := s.chooser.Load().choose(&cri.ImageSpec{Image: ref, RuntimeHandler: handler})
	if err != nil {
		return storage.Image{}, err
	}
	return s.PullInto(ctx, chosen.root(), ref, opt)
}

// PullInto pulls into a root, by its name. Where images that CRI-O has pulled lean, and the pull needs one of their
// layers, these images are mended first; it returns storage.ErrLeans with who uses them where they cannot be.
func (s *Service) PullInto(ctx context.Context, name, ref string, opt storage.PullOptions) (storage.Image, error) {
	root, err := s.writable(ctx, name)
	if err != nil {
		return storage.Image{}, fmt.Errorf("pull %q: %w", ref, err)
	}
	bring := func() (storage.Image, error) {
		return bring(ctx, root, opt.Progress, func(ctx context.Context, progress func(storage.Progress)) (storage.Image, error) {
			opt := opt
			opt.Progress = progress
			return root.Pull(ctx, ref, opt)
		})
	}
	image, err := bring()
	if !errors.Is(err, storage.ErrLeans) {
		return image, err
	}
	if mendErr := s.mendAll(ctx); mendErr != nil {
		return storage.Image{}, fmt.Errorf("%w: %w", err, mendErr)
	}
	return bring()
}

// bring has fn bring an image into the root, and leaves it alone when the root's disk does not answer: progress is not
// called after the return.
func bring(ctx context.Context, root *storage.Root, progress func(storage.Progress),
	fn func(context.Context, func(storage.Progress)) (storage.Image, error),
) (storage.Image, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex
	left := false
	defer func() {
		mu.Lock()
		defer mu.Unlock()
		left = true
	}()
	report := func(p storage.Progress) {
		mu.Lock()
		defer mu.Unlock()
		if progress != nil && !left {
			progress(p)
		}
	}
	return storage.Bounded(root, func() (storage.Image, error) { return fn(ctx, report) })
}

// Import imports from a file or directory into the root of a handler, or, where handler is empty, into CRI-O's own.
func (s *Service) Import(ctx context.Context, handler, from string, opt storage.ImportOptions) (storage.Image, error) {
	chosen, err := s.chooser.Load().known(cmp.Or(handler, DefaultRoot))
	if err != nil {
		return storage.Image{}, err
	}
	root, err := s.writable(ctx, chosen.root())
	if err != nil {
		return storage.Image{}, fmt.Errorf("import %s: %w", from, err)
	}
	return bring(ctx, root, opt.Progress, func(ctx context.Context, progress func(storage.Progress)) (storage.Image, error) {
		opt.Progress = progress
		return root.Import(ctx, from, opt)
	})
}

// writable returns the root if images may be brought into it now.
func (s *Service) writable(ctx context.Context, name string) (*storage.Root, error) {
	root, err := s.roots.Handler(name)
	if err == nil && name != DefaultRoot && s.mayPull != nil {
		err = s.mayPull(ctx, name)
	}
	return root, err
}

// pullByCRIO leaves a pull to CRI-O.
func (s *Service) pullByCRIO(ctx context.Context, req *cri.PullImageRequest) (id string, err error) {
	spec := &cri.ImageSpec{
		Image: req.GetImage().GetImage(), Annotations: req.GetImage().GetAnnotations(),
		UserSpecifiedImage: req.GetImage().GetUserSpecifiedImage(),
	}
	pulled, err := s.images.PullImage(ctx, &cri.PullImageRequest{Image: spec, Auth: req.GetAuth(), SandboxConfig: req.GetSandboxConfig()})
	if err != nil {
		return "", fromCRIO(s.crio, err)
	}
	// Up to 1.35, CRI-O answers with repository@digest.
	status, err := s.images.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: pulled.GetImageRef()}})
	if err != nil {
		return "", fromCRIO(s.crio, err)
	}
	if status.GetImage() == nil {
		return "", fmt.Errorf("pull %q: CRI-O has pulled %s and does not have it", spec.GetImage(), pulled.GetImageRef())
	}
	id = status.GetImage().GetId()
	root, err := s.roots.Handler(DefaultRoot)
	if err != nil {
		return "", err
	}
	return id, root.KeepProof(ctx, id, req.GetSandboxConfig().GetMetadata().GetNamespace())
}

// credentials returns what CRI's AuthConfig gives; nil for nothing.
func credentials(auth *cri.AuthConfig) (*storage.Auth, error) {
	secret := storage.Auth{
		Username: auth.GetUsername(), Password: auth.GetPassword(),
		IdentityToken: auth.GetIdentityToken(), RegistryToken: auth.GetRegistryToken(),
	}
	if auth.GetAuth() != "" {
		decoded, err := base64.StdEncoding.DecodeString(auth.GetAuth())
		if err != nil {
			return nil, fmt.Errorf("%w: auth of the credentials is not base64", storage.ErrInvalidReference)
		}
		name, password, ok := strings.Cut(string(decoded), ":")
		if !ok {
			return nil, fmt.Errorf("%w: auth of the credentials is not user:password", storage.ErrInvalidReference)
		}
		secret.Username, secret.Password = name, strings.Trim(password, "\x00")
	}
	if secret == (storage.Auth{}) {
		return nil, nil //nolint:nilnil // no credentials is what it says
	}
	return &secret, nil
}
