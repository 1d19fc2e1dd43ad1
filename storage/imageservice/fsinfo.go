package imageservice

import (
	"context"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/storage"
)

// ImageFsInfo tells what images take of the disks: first CRI-O's disk with all roots that are on it, which is all that
// kubelet looks at, then the others. What cannot be read is left out and logged. Layers whose size is not known yet count
// as the registry gave it.
func (s *Service) ImageFsInfo(ctx context.Context, _ *cri.ImageFsInfoRequest) (*cri.ImageFsInfoResponse, error) {
	disks, err := s.disks(ctx)
	if err != nil {
		return nil, asStatus(err)
	}
	now := time.Now().UnixNano()
	resp := &cri.ImageFsInfoResponse{}
	for _, disk := range disks {
		resp.ImageFilesystems = append(resp.ImageFilesystems, &cri.FilesystemUsage{
			Timestamp:  now,
			FsId:       &cri.FilesystemIdentifier{Mountpoint: disk.Mountpoint},
			UsedBytes:  &cri.UInt64Value{Value: disk.Bytes},
			InodesUsed: &cri.UInt64Value{Value: disk.Inodes},
		})
	}
	resp.ContainerFilesystems = resp.GetImageFilesystems()[:1]
	return resp, nil
}

// disks adds the roots' usage up by disk, CRI-O's first.
func (s *Service) disks(ctx context.Context) ([]storage.Usage, error) {
	var disks []storage.Usage
	var errs []error
roots:
	for _, name := range s.roots.Names() {
		usage, err := s.usage(ctx, name)
		switch {
		case err != nil && (name == DefaultRoot || ctx.Err() != nil):
			return nil, err
		case err != nil:
			errs = append(errs, err)
			continue
		}
		errs = append(errs, usage.Bad...)
		for i := range disks {
			if disks[i].Device == usage.Device {
				disks[i].Bytes += usage.Bytes
				disks[i].Inodes += usage.Inodes
				continue roots
			}
		}
		disks = append(disks, usage)
	}
	s.unread.log(s.log, "disk use is not whole", errs)
	return disks, nil
}

func (s *Service) usage(ctx context.Context, name string) (storage.Usage, error) {
	root, err := s.roots.Handler(name)
	if err != nil {
		return storage.Usage{}, err
	}
	return storage.Bounded(root, func() (storage.Usage, error) { return root.Usage(ctx) })
}
